"""What commands refuse, and with which words and code; what --dry-run shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from trireme.launch import plan
from trireme.launch.rundir import RunDirectory, RunState

Trireme = Callable[..., Result]


def flat(result: Result) -> str:
    """Output without the line breaks that depend on the terminal."""
    return " ".join(result.output.split())


def test_up_refuses_a_missing_file(trireme: Trireme, tmp_path: Path) -> None:
    result = trireme("up", tmp_path / "no.yaml")
    assert result.exit_code == 2
    assert "no.yaml" in flat(result)


def test_up_refuses_a_mistyped_key_and_offers_the_nearest(trireme: Trireme, config_file: Path) -> None:
    result = trireme("up", config_file, "grpo.num_prompt_per_step=2")
    assert result.exit_code == 2
    assert "num_prompts_per_step" in flat(result)


def test_up_refuses_a_missing_model_folder(trireme: Trireme, config_file: Path, tmp_path: Path) -> None:
    result = trireme("up", config_file, f"policy.model_name={tmp_path}/nowhere")
    assert result.exit_code == 2
    assert "policy.model_name" in flat(result) and f"{tmp_path}/nowhere" in flat(result)
    assert not (tmp_path / "run").exists()


def test_up_says_how_to_make_the_demonstration_model(trireme: Trireme, config_file: Path) -> None:
    result = trireme("up", config_file, "policy.model_name=models/of/SmolLM2-135M-Instruct")
    assert result.exit_code == 2
    assert "trireme model smollm2 models/of/SmolLM2-135M-Instruct" in flat(result)


def test_up_refuses_an_unsupported_architecture(trireme: Trireme, config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "model/config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    result = trireme("up", config_file)
    assert result.exit_code == 2
    assert "MambaForCausalLM" in flat(result)


@pytest.mark.parametrize("words", [("up",), ("serve", "rollout", "--config")])
def test_a_missing_system_library_is_named(
    trireme: Trireme, config_file: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """vLLM's CPU kernels do not load without libnuma, as on a slim Debian; its own words for it name neither."""
    monkeypatch.setattr(plan, "NUMA", "libno-such-thing.so.1")
    monkeypatch.setattr(plan, "available_gpus", lambda: ())
    result = trireme(*words, config_file)
    assert result.exit_code == 2
    assert "libno-such-thing.so.1" in flat(result) and "apt-get install libnuma1" in flat(result)


@pytest.mark.parametrize("words", [("up",), ("serve", "rollout", "--config")])
def test_a_missing_extra_is_named(
    trireme: Trireme, config_file: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setitem(plan.REQUIREMENTS, "rollout", (("no_such_module", "vLLM"),))
    result = trireme(*words, config_file)
    assert result.exit_code == 2
    assert "the rollout service needs vLLM" in flat(result)
    assert "pip install 'trireme-rl[rollout]'" in flat(result)


def test_dry_run_shows_each_service_and_starts_nothing(trireme: Trireme, config_file: Path, tmp_path: Path) -> None:
    result = trireme("up", config_file, "rollout.replicas=2", "redis.url=redis://:hush@127.0.0.1:1/0", "--dry-run")
    assert result.exit_code == 0, result.output
    for name in ("reward-0", "rollout-0", "rollout-1", "trainer"):
        assert f"{name}\n  env " in result.output
    assert "services.rollout --config" in result.output and "num_prompts_per_step: 2" in result.output
    assert "hush" not in result.output
    assert not (tmp_path / "run").exists()


def test_serve_needs_a_redis(trireme: Trireme, config_file: Path) -> None:
    result = trireme("serve", "reward", "--config", config_file)
    assert result.exit_code == 2
    assert "redis.url" in flat(result) and "TRIREME_REDIS_URL" in flat(result)


def test_serve_knows_three_services(trireme: Trireme, config_file: Path) -> None:
    result = trireme("serve", "rewards", "--config", config_file)
    assert result.exit_code == 2
    assert "rollout" in result.output and "trainer" in result.output


def test_down_where_nothing_runs_is_no_error(trireme: Trireme, tmp_path: Path) -> None:
    result = trireme("down", tmp_path)
    assert result.exit_code == 0
    assert "no run is going on" in flat(result)


@pytest.mark.parametrize("command", ["down", "status"])
def test_a_directory_that_is_not_there_is_refused(trireme: Trireme, tmp_path: Path, command: str) -> None:
    result = trireme(command, tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "nowhere" in flat(result)


@pytest.mark.parametrize(
    ("state", "code", "shown"), [("finished", 0, "finished"), ("failed", 3, "failed"), ("running", None, "died")]
)
def test_status_of_a_run_that_is_over(
    trireme: Trireme, tmp_path: Path, state: str, code: int | None, shown: str
) -> None:
    """A run whose process is gone is not running, whatever it wrote last."""
    RunDirectory(tmp_path).save_state(RunState("r", state, "redis://:hush@127.0.0.1:1/0", exit_code=code))
    assert shown in trireme("status", tmp_path).output
    report = json.loads(trireme("status", tmp_path, "--json").output)
    assert report["state"] == shown and report["exit_code"] == code
    assert "hush" not in report["redis_url"]


def test_status_takes_the_newest_run(trireme: Trireme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for index, name in enumerate(("new", "old")):
        directory = RunDirectory(tmp_path / "runs" / name)
        directory.path.mkdir(parents=True)
        directory.save_state(RunState(name, "finished", "redis://127.0.0.1:1/0", exit_code=0))
        os.utime(directory.state_file, (1000 - index, 1000 - index))
    monkeypatch.chdir(tmp_path)
    assert json.loads(trireme("status", "--json").output)["run"] == "new"
