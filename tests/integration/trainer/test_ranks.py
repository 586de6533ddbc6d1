"""Rank 0 leading another rank over real gloo, with a backend that only records what is called (named as a fake)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from services.trainer.backends.base import Objective, StepResult
from services.trainer.batch import Batch
from services.trainer.ranks import Channel, Leader, follow
from tests.unit.trainer.builders import ended


class FakeBackend:
    """Records calls; one collective in each, so that a rank that did not follow would hang the other."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _call(self, what: str) -> None:
        dist.barrier()
        self.calls.append(what)

    def log_probs(self, batch: Batch, which: Literal["policy", "reference"] = "policy") -> Tensor:
        self._call(f"log_probs {which} {batch.tokens.tolist()}")
        return torch.zeros(len(batch.tokens))

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        self._call(f"step {batch.advantages.tolist()}")
        return StepResult(0.0, 0.0, 0.0, torch.zeros(len(batch.tokens)), {}, True)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for number in range(2):
            self._call(f"tensor {number}")
            yield f"tensor {number}", torch.zeros(1)

    def save(self, directory: Path) -> Future[None]:
        self._call(f"save {directory}")
        return ended()

    def restore(self, directory: Path) -> None:
        self._call(f"restore {directory}")


def small_batch() -> Batch:
    return Batch(
        tokens=torch.tensor([3, 1, 4]),
        lengths=torch.tensor([3]),
        prompt_lengths=torch.tensor([1]),
        group=torch.tensor([0]),
        age=torch.tensor([0]),
        loss_mask=torch.tensor([False, True, True]),
        generation_log_probs=torch.zeros(3),
        advantages=torch.tensor([0.0, 0.5, 0.5]),
    )


def nothing(*_: object) -> tuple[Tensor, dict[str, Tensor]]:
    raise AssertionError("the fake backend never computes a loss")


def rank_main(rank: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    backend, channel = FakeBackend(), Channel()
    if rank == 0:
        leader, batch = Leader(backend, channel), small_batch()
        leader.restore(Path("/a/ö"))
        leader.log_probs(batch)
        leader.log_probs(batch, "reference")
        leader.step(batch, nothing)
        assert [name for name, _ in leader.tensors()] == ["tensor 0", "tensor 1"]
        next(iter(leader.tensors()))  # whoever stops after the first does not leave the followers waiting
        try:
            for _ in leader.tensors():
                raise OSError("the disk is full")  # nor does whoever fails
        except OSError as error:
            kept = error  # and the iterator with it, as a traceback that is going to be logged does
        leader.save(Path("/b"))
        leader.end()
        assert kept.__traceback__ is not None
    else:
        follow(backend, channel, nothing)
    (Path(folder) / str(rank)).write_text("\n".join(backend.calls))
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_followers_make_every_call_with_the_same_arguments(tmp_path: Path) -> None:
    mp.spawn(rank_main, (free_port(), str(tmp_path)), nprocs=2)
    leader, follower = ((tmp_path / str(rank)).read_text().splitlines() for rank in range(2))
    assert follower == leader
    assert leader == [
        "restore /a/ö",
        "log_probs policy [3, 1, 4]",
        "log_probs reference [3, 1, 4]",
        "step [0.0, 0.5, 0.5]",
        *["tensor 0", "tensor 1"] * 3,
        "save /b",
    ]


class FailsOnRank0(FakeBackend):
    def step(self, batch: Batch, objective: Objective) -> StepResult:
        if dist.get_rank() == 0:
            raise MemoryError("of this rank alone")
        return super().step(batch, objective)


def failing_rank_main(rank: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    backend, channel = FailsOnRank0(), Channel()
    if rank == 0:
        leader = Leader(backend, channel)
        with pytest.raises(MemoryError):
            leader.step(small_batch(), nothing)
        leader.end()  # would wait for the follower, which waits for this rank
    else:
        with pytest.raises(RuntimeError):  # gloo's word for a peer that is gone
            follow(backend, channel, nothing)
    (Path(folder) / str(rank)).touch()
    os._exit(0)


def test_an_error_of_rank_0_alone_ends_every_rank(tmp_path: Path) -> None:
    """The followers sit in a collective of the call that failed: another announcement would wait for them for ever."""
    context = mp.spawn(failing_rank_main, (free_port(), str(tmp_path)), nprocs=2, join=False)
    ended = context.join(timeout=120) or context.join(timeout=120)
    for process in context.processes:
        process.kill()
    assert ended
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
