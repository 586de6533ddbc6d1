"""From a configuration to processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trireme.config import Config, load_config
from trireme.launch import plan
from trireme.launch.plan import PlanError, core_binding, describe, make_plan, require_installed
from trireme.launch.process import ProcessSpec
from trireme.launch.rundir import RunDirectory

FILE = """\
run: {name: r, dir: runs/r}
grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 2, max_num_steps: 3}
policy:
  model_name: somebody/something
  train_global_batch_size: 4
  megatron_cfg: {enabled: true}
  generation: {max_new_tokens: 8}
data: {dataset_name: reasoning_gym/chain_sum}
cluster: {gpus_per_node: 1, num_nodes: 1}
"""
URL = "redis://:secret@127.0.0.1:7000/0"
ASYNC = (
    "grpo.async_grpo.enabled=true",
    "loss_fn.use_importance_sampling_correction=true",
)


def config(tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return load_config(path, overrides)


def planned(tmp_path: Path, *overrides: str, cores: int = 2, gpus: tuple[str, ...] = ()) -> dict[str, ProcessSpec]:
    specs = make_plan(config(tmp_path, *overrides), RunDirectory(tmp_path / "run"), URL, range(cores), gpus)
    return {spec.name: spec for spec in specs}


def test_order_names_commands(tmp_path: Path) -> None:
    specs = planned(tmp_path, "rollout.replicas=2")
    assert list(specs) == ["reward-0", "rollout-0", "rollout-1", "trainer"]
    file = str(tmp_path / "run/config.yaml")
    assert specs["rollout-1"].command == [
        *(sys.executable, "-m", "services.rollout", "--config", file, "--name", "rollout-1")
    ]
    assert specs["trainer"].command[1:5] == ["-m", "services.trainer", "--config", file]
    assert [spec.restartable for spec in specs.values()] == [True, True, True, False]


def test_several_ranks_run_under_torchrun(tmp_path: Path) -> None:
    command = planned(tmp_path, "cluster.gpus_per_node=2")["trainer"].command
    assert command[1:8] == [
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "services.trainer")
    ]


def test_fixed_ports_are_counted_up_over_replicas(tmp_path: Path) -> None:
    specs = planned(tmp_path, "rollout.replicas=3", "rollout.port=7100", "rollout.metrics_port=7200")
    assert "rollout.port=7100" not in specs["rollout-0"].command  # the file says it
    for index in (1, 2):
        words = specs[f"rollout-{index}"].command
        assert f"rollout.port={7100 + index}" in words and f"rollout.metrics_port={7200 + index}" in words


def test_on_policy_rollout_and_trainer_each_get_all_cores(tmp_path: Path) -> None:
    specs = planned(tmp_path)
    assert specs["rollout-0"].environment["OMP_NUM_THREADS"] == "2"
    assert specs["rollout-0"].environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert specs["trainer"].environment["OMP_NUM_THREADS"] == "2"
    assert specs["reward-0"].environment["OMP_NUM_THREADS"] == "1"


def test_off_policy_they_share_the_cores(tmp_path: Path) -> None:
    specs = planned(tmp_path, *ASYNC, cores=4)
    assert specs["rollout-0"].environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert specs["trainer"].environment["OMP_NUM_THREADS"] == "2"


def test_cores_of_a_replica_are_divided_over_its_ranks() -> None:
    assert core_binding([4, 5, 6, 7], ranks=2) == "4,5|6,7"
    assert core_binding([3], ranks=2) == "3|3"


def test_trainer_threads_can_be_set(tmp_path: Path) -> None:
    assert planned(tmp_path, "trainer.threads=1")["trainer"].environment["OMP_NUM_THREADS"] == "1"


def test_gpus_go_to_the_trainer_first(tmp_path: Path) -> None:
    specs = planned(tmp_path, "rollout.replicas=2", gpus=("0", "1", "2"))
    assert [specs[name].environment["CUDA_VISIBLE_DEVICES"] for name in ("trainer", "rollout-0", "rollout-1")] == [
        *("0", "1", "2")
    ]
    assert "CUDA_VISIBLE_DEVICES" not in specs["reward-0"].environment
    assert "CUDA_VISIBLE_DEVICES" not in planned(tmp_path, gpus=("0",))["trainer"].environment


def test_the_password_is_in_the_environment_and_nowhere_else(tmp_path: Path) -> None:
    for spec in planned(tmp_path).values():
        assert spec.environment["TRIREME_REDIS_URL"] == URL
        assert "secret" not in " ".join(spec.command) and "secret" not in describe(spec)


def test_what_is_not_installed_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plan.REQUIREMENTS, "rollout", (("no_such_module", "vLLM"), ("torch", "PyTorch")))
    with pytest.raises(PlanError, match=r"needs vLLM, not installed.*pip install 'trireme-rl\[rollout\]'"):
        require_installed("rollout", config(tmp_path))
