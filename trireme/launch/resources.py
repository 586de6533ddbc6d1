"""How the cores and GPUs of one machine are divided among the services. Pure, apart from the two `available_*`.

Cores: more runnable threads than cores make everything several times slower, fewer leave cores idle. In strict
on-policy mode rollout and trainer take turns (one waits while the other computes), so each may use all of them;
otherwise they run at the same time and each gets half. Replicas of the rollout, and ranks of the trainer, always run
at the same time and share what their service has. Verifiers get one thread per worker process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# A step on a CPU asks for the same large buffers again and again. The GNU allocator maps and unmaps each anew, half a
# million page faults a step of a small model; so it is told to keep what it has, in one place.
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


@dataclass(frozen=True)
class Cores:
    """Core ids for each rollout replica, and threads for each trainer rank."""

    rollout: tuple[tuple[int, ...], ...]
    trainer_threads: int


def divide_cores(cores: Sequence[int], replicas: int, ranks: int, take_turns: bool) -> Cores:
    """`take_turns`: rollout and trainer never compute at the same time."""
    half = (len(cores) + 1) // 2
    rollout = cores if take_turns else cores[:half]
    trainer = cores if take_turns else cores[half:] or cores
    return Cores(rollout=split(rollout, replicas), trainer_threads=max(1, len(trainer) // ranks))


def split(items: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Contiguous shares of equal size, none empty: with fewer items than parts, items serve several parts in turn."""
    if len(items) < parts:
        return tuple((items[part % len(items)],) for part in range(parts))
    size = len(items) // parts
    return tuple(tuple(items[part * size : (part + 1) * size]) for part in range(parts))


@dataclass(frozen=True)
class Gpus:
    """GPU names as CUDA_VISIBLE_DEVICES takes them: per rollout replica, and those of the trainer."""

    rollout: tuple[tuple[str, ...], ...]
    trainer: tuple[str, ...]


def divide_gpus(gpus: Sequence[str], replicas: int, gpus_per_replica: int, ranks: int) -> Gpus | None:
    """The trainer's first, then each replica's own. None when there are too few for that: then all share them."""
    if len(gpus) < ranks + replicas * gpus_per_replica:
        return None
    rest = gpus[ranks:]
    shares = tuple(tuple(rest[i * gpus_per_replica : (i + 1) * gpus_per_replica]) for i in range(replicas))
    return Gpus(rollout=shares, trainer=tuple(gpus[:ranks]))


def available_cores(environment: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Ids of the cores that this process may use, cut to a container's CPU quota and to OMP_NUM_THREADS when set."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    limit = min(len(cores), _quota() or len(cores), _number(environment.get("OMP_NUM_THREADS")) or len(cores))
    return cores[: max(1, limit)]


def available_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[str, ...]:
    """NVIDIA GPUs that this process may use, found without loading CUDA."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    numbers = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
    return tuple(sorted((number for number in numbers if number.isdigit()), key=int))


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """Whole cores that the control group allows; None without a limit."""
    if not path.exists():
        return None
    quota, period = path.read_text().split()
    return None if quota == "max" else max(1, int(quota) // int(period))


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and int(text) > 0 else None
