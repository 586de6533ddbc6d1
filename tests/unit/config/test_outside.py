"""What others see of the configuration: the command, the plan of a run, the reference page, the imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.unit.config.support import FILES, NO_TENSORS, SMALLEST, make
from trireme.cli.config import app
from trireme.config import load_config
from trireme.config.plan import dry_run
from trireme.config.reference import render

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "vllm", "transformers", "numpy", "redis", "grpc")


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(SMALLEST))
    return str(path)


def test_check_accepts_a_right_file(file: str) -> None:
    code, out, err = invoke("check", file, "grpo.seed=3", "env.math.num_workers=2")
    assert (code, out) == (0, f"{file}: ok\n")
    assert "warning: env.math.num_workers is ignored" in err
    assert "some/model is not on this machine" in err


@pytest.mark.parametrize("command", ["check", "show"])
def test_a_wrong_file_ends_with_code_2_and_its_message_alone(file: str, command: str) -> None:
    code, out, err = invoke(command, file, "grpo.sed=3")
    assert (code, out) == (2, "")
    assert err == f"error: {file}: unknown key grpo.sed; did you mean grpo.seed?\n"


def test_check_looks_into_the_model_folder_unless_told_not_to(file: str) -> None:
    code, _, err = invoke("check", file, "policy.model_name=/no/such/model")
    assert code == 2
    assert "policy.model_name: no folder /no/such/model" in err
    assert invoke("check", "--no-model", file, "policy.model_name=/no/such/model")[0] == 0


def test_show_prints_what_loads_again_without_the_password(file: str, tmp_path: Path) -> None:
    code, out, _ = invoke("show", file, "grpo.seed=3", "redis.url=redis://:secret@host")
    assert code == 0
    assert "secret" not in out
    again = tmp_path / "again.yaml"
    again.write_text(out)
    assert load_config(again, ["redis.url=null"]) == make("grpo.seed=3")


def test_a_dry_run_says_what_each_service_gets() -> None:
    plan = dry_run(make("redis.url=redis://:secret@host", "rollout.replicas=3", "cluster.gpus_per_node=2"))
    assert list(plan) == ["redis", "reward", "rollout", "trainer"]
    assert {name: service["processes"] for name, service in plan.items()} == {
        "redis": 0,
        "reward": 1,
        "rollout": 3,
        "trainer": 2,
    }
    assert plan["rollout"]["config"]["policy"]["generation"]["max_new_tokens"] == 512
    assert "megatron_cfg" not in plan["rollout"]["config"]["policy"]
    assert "loss_fn" in plan["trainer"]["config"]
    assert "secret" not in json.dumps(plan)


def test_an_embedded_redis_is_in_the_plan() -> None:
    redis = dry_run(make())["redis"]
    assert (redis["processes"], redis["config"]["embedded"]) == (1, True)


def test_the_reference_page_is_that_of_these_models() -> None:
    """docs/configuration.md is written by `trireme config reference --output docs/configuration.md`."""
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == render()


def test_the_reference_command_writes_it(tmp_path: Path) -> None:
    assert invoke("reference", "--output", str(tmp_path / "page.md"))[0] == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == render() == invoke("reference")[1]


def test_checking_a_configuration_imports_nothing_heavy(tmp_path: Path) -> None:
    """The base install has neither torch nor vLLM nor transformers."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(NO_TENSORS)
    (model / "tokenizer.json").touch()
    sizes = dict.fromkeys(("num_attention_heads", "hidden_size", "num_hidden_layers", "vocab_size"), 4)
    hf_config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512, **sizes}
    (model / "config.json").write_text(json.dumps(hf_config))
    code = (
        "import sys; from typer.testing import CliRunner; from trireme.cli.config import app; import trireme.config\n"
        "result = CliRunner().invoke(app, sys.argv[1:])\n"
        "assert result.exit_code == 0, result.output\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    file = str(FILES / "grpo_math_1B_megatron.yaml")
    command = [sys.executable, "-c", code, "check", file, f"policy.model_name={model}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
