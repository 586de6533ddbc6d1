"""From a configuration to the processes of its run."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.config import Config
from trireme.config.loader import REDIS_URL_VARIABLE
from trireme.contracts.grpc import bind_error
from trireme.launch.process import ProcessSpec
from trireme.launch.resources import (
    KEEP_MEMORY,
    THREAD_VARIABLES,
    Cores,
    Gpus,
    available_gpus,
    divide_cores,
    divide_gpus,
)
from trireme.launch.rundir import RunDirectory
from trireme.registry import Kind

# What each service cannot run without: module to look for, the name people know it by.
REQUIREMENTS: dict[str, tuple[tuple[str, str], ...]] = {
    "rollout": (("vllm", "vLLM"), ("torch", "PyTorch")),
    "reward": (),
    "trainer": (("torch", "PyTorch"), ("transformers", "Transformers")),
}
NUMA = "libnuma.so.1"
EXTRAS = {
    "rollout": "'trireme-rl[rollout]' (on a machine without a GPU: 'trireme-rl[rollout-cpu]')",
    "reward": "'trireme-rl[reward]'",
    "trainer": "'trireme-rl[trainer]'",
}


class PlanError(Exception):
    """The run cannot be started on this machine; the message says what to change."""


def make_plan(
    config: Config, directory: RunDirectory, redis_url: str, cores: Sequence[int], gpus: Sequence[str]
) -> list[ProcessSpec]:
    """The processes in the order of their start: reward replicas, rollout replicas, the trainer.

    None has to wait for another: the trainer waits for servers itself, and a rollout server that comes up after its
    first publish catches up. So the minutes that engine and trainer take to load pass once.
    cores: ids; gpus: as CUDA_VISIBLE_DEVICES names them. `redis_url` goes to the services by their environment, so
    that it shows in no list of processes and the saved configuration can start another run.
    """
    ranks = config.trainer.nproc
    share = divide_cores(cores, config.rollout.replicas, ranks, takes_turns(config))
    devices = divide_gpus(gpus, config.rollout.replicas, gpus_per_replica(config), ranks)
    make = Maker(config, directory, redis_url, share, devices)
    rewards = [make.reward(index) for index in range(config.reward.replicas)]
    rollouts = [make.rollout(index) for index in range(config.rollout.replicas)]
    return [*rewards, *rollouts, make.trainer()]


def takes_turns(config: Config) -> bool:
    """Whether rollout and trainer never compute at the same time (strict on-policy)."""
    return not config.staleness.max_versions


def gpus_per_replica(config: Config) -> int:
    vllm = config.policy.generation.vllm_cfg
    return vllm.tensor_parallel_size * vllm.pipeline_parallel_size


def missing_parts(kind: Kind, config: Config | None) -> list[str]:
    """What is not installed of what service `kind` needs, by the names that people know; None: not to train."""
    needed = list(REQUIREMENTS[kind])
    if kind == "trainer" and config and config.policy.megatron_cfg.enabled:
        needed.append(("megatron.core", "Megatron-Core"))
    return [name for module, name in needed if not _installed(module)]


def require_installed(kind: Kind, config: Config | None) -> None:
    """Raises PlanError naming the extra, or the library, to install when service `kind` cannot run here."""
    if missing := missing_parts(kind, config):
        raise PlanError(
            f"the {kind} service needs {' and '.join(missing)}, not installed here: pip install {EXTRAS[kind]}"
        )


def require_libraries(kind: Kind) -> None:
    """Raises PlanError when vLLM's CPU kernels would not load, which it says in words that nobody understands."""
    if kind != "rollout" or available_gpus():
        return
    try:
        ctypes.CDLL(NUMA)
    except OSError as error:
        raise PlanError(f"vLLM on a CPU needs {NUMA} ({error}): apt-get install libnuma1") from error


def require_free_ports(config: Config) -> None:
    """Raises PlanError naming the key when a port that the configuration fixes is taken."""
    for kind, replicas in (("reward", config.reward.replicas), ("rollout", config.rollout.replicas), ("trainer", 1)):
        block = getattr(config, kind)
        for key in ("port", "metrics_port"):
            for offset in range(replicas if getattr(block, key) else 0):
                if error := bind_error(block.host, getattr(block, key) + offset):
                    raise PlanError(f"{kind}.{key}: {error.strerror}; 0 takes any free port")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


@dataclass(frozen=True)
class Maker:
    """Makes the processes of one run, each with its share of the machine."""

    config: Config
    directory: RunDirectory
    redis_url: str
    cores: Cores
    gpus: Gpus | None

    def reward(self, index: int) -> ProcessSpec:
        return self._replica("reward", index, self._environment(threads=1))

    def rollout(self, index: int) -> ProcessSpec:
        own = self.cores.rollout[index]
        environment = self._environment(len(own), self.gpus.rollout[index] if self.gpus else None) | self._allocator()
        environment["VLLM_CPU_OMP_THREADS_BIND"] = core_binding(own, gpus_per_replica(self.config))
        return self._replica("rollout", index, environment)

    def trainer(self) -> ProcessSpec:
        threads = self.config.trainer.threads or self.cores.trainer_threads
        return ProcessSpec(
            kind="trainer",
            name="trainer",
            command=service_command("trainer", self.directory.config, name="trainer", ranks=self.config.trainer.nproc),
            log=self.directory.log("trainer"),
            environment=self._environment(threads, self.gpus.trainer if self.gpus else None) | self._allocator(),
            startup_timeout_s=self.config.trainer.startup_timeout_s,
        )

    def _replica(self, kind: Kind, index: int, environment: Mapping[str, str]) -> ProcessSpec:
        name = f"{kind}-{index}"
        command = service_command(kind, self.directory.config, _ports(self.config, kind, index), name=name)
        return ProcessSpec(
            kind=kind,
            name=name,
            command=command,
            log=self.directory.log(name),
            environment=environment,
            startup_timeout_s=self.config.rollout.startup_timeout_s,
            restartable=True,
        )

    def _allocator(self) -> dict[str, str]:
        """Without GPUs, unless the user has settings of their own."""
        return {} if self.gpus or KEEP_MEMORY.keys() & os.environ.keys() else KEEP_MEMORY

    def _environment(self, threads: int, gpus: Sequence[str] | None = None) -> dict[str, str]:
        environment = {**dict.fromkeys(THREAD_VARIABLES, str(threads)), REDIS_URL_VARIABLE: self.redis_url}
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return environment


def service_command(
    kind: str, config: Path, overrides: Sequence[str] = (), *, name: str | None = None, ranks: int = 1
) -> list[str]:
    """The command of one service; with several ranks, under torchrun on this machine alone."""
    launcher = ["torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone", "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *launcher, f"services.{kind}", "--config", str(config), *overrides]
    return [*command, "--name", name] if name else command


def _ports(config: Config, kind: str, index: int) -> list[str]:
    """Replicas after the first get the ports after the configured ones; 0 stays any free port."""
    block = getattr(config, kind)
    fixed = [key for key in ("port", "metrics_port") if getattr(block, key) and index]
    return [f"{kind}.{key}={getattr(block, key) + index}" for key in fixed]


def core_binding(cores: Sequence[int], ranks: int) -> str:
    """vLLM's CPU workers pin themselves: the cores of each rank, ranks separated by a bar. Ignored on GPUs."""
    size = max(1, len(cores) // ranks)
    shares = [cores[rank * size : (rank + 1) * size] or cores[-1:] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def describe(spec: ProcessSpec) -> str:
    """One service as --dry-run shows it: its environment without secrets, a command that could be pasted, its log."""
    shown = {key: value for key, value in spec.environment.items() if key != REDIS_URL_VARIABLE}
    variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in shown.items())
    return f"{spec.name}\n  env      {variables}\n  command  {shlex.join(spec.command)}\n  log      {spec.log}"
