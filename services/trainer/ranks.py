"""How rank 0 leads the other ranks of a trainer: it announces each call, they make the same one.

Rank 0 holds a `Leader`, a Backend that first broadcasts what is about to be called; every other rank sits in
`follow`. Arguments travel as safetensors or UTF-8 bytes, never pickled, over a gloo group of its own: its timeout is
that of a run (followers wait here while rank 0 collects samples), not that of a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.backends.base import Backend, Objective, StepResult
from services.trainer.batch import Batch, from_bytes, to_bytes

# Followers may wait for samples as long as a slow environment takes; a dead leader closes the socket at once.
COMMAND_TIMEOUT = timedelta(days=7)


class Call(IntEnum):
    """The Backend calls that rank 0 may announce."""

    END = 0
    LOG_PROBS_POLICY = 1
    LOG_PROBS_REFERENCE = 2
    STEP = 3
    TENSORS = 4
    SAVE = 5
    RESTORE = 6


LOG_PROBS: dict[str, Call] = {"policy": Call.LOG_PROBS_POLICY, "reference": Call.LOG_PROBS_REFERENCE}


class Channel:
    """Broadcasts (call, payload) from rank 0. Construct it on every rank at the same point."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)

    def announce(self, call: Call, payload: bytes = b"") -> None:
        dist.broadcast(torch.tensor([int(call), len(payload)]), src=0, group=self._group)
        if payload:
            dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), src=0, group=self._group)

    def receive(self) -> tuple[Call, bytes]:
        header = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(header, src=0, group=self._group)
        payload = torch.zeros(int(header[1]), dtype=torch.uint8)
        if len(payload):
            dist.broadcast(payload, src=0, group=self._group)
        return Call(int(header[0])), payload.numpy().tobytes()


class Leader:
    """Rank 0's Backend: announces a call to the followers, then makes it.

    A call that fails here alone leaves the followers inside it, waiting for this rank. They hear no announcement any
    more: what ends them is that this process does.
    """

    def __init__(self, backend: Backend, channel: Channel) -> None:
        self._backend, self._channel = backend, channel
        self._unread: Iterator[tuple[str, Tensor]] = iter(())
        self._in_step = True  # the followers wait for an announcement, and not inside a call

    def log_probs(self, batch: Batch, which: Literal["policy", "reference"] = "policy") -> Tensor:
        self._announce(LOG_PROBS[which], to_bytes(batch))
        with self._call():
            return self._backend.log_probs(batch, which)

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        self._announce(Call.STEP, to_bytes(batch))
        with self._call():
            return self._backend.step(batch, objective)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        self._announce(Call.TENSORS)
        self._unread = self._backend.tensors()
        while (pair := self._next_tensor()) is not None:
            yield pair

    def save(self, directory: Path) -> Future[None]:
        self._announce(Call.SAVE, str(directory).encode())
        with self._call():
            return self._backend.save(directory)

    def restore(self, directory: Path) -> None:
        self._announce(Call.RESTORE, str(directory).encode())
        with self._call():
            self._backend.restore(directory)

    def end(self) -> None:
        """Release the followers."""
        if self._in_step:
            self._announce(Call.END)

    def _announce(self, call: Call, payload: bytes = b"") -> None:
        while self._next_tensor() is not None:  # the followers go through all of them, whoever stopped before
            pass
        self._channel.announce(call, payload)

    def _next_tensor(self) -> tuple[str, Tensor] | None:
        with self._call():
            return next(self._unread, None)

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._in_step = False
        yield
        self._in_step = True


def follow(backend: Backend, channel: Channel, objective: Objective) -> None:
    """Repeat rank 0's calls until it ends. `objective` must be built from the same configuration as rank 0's."""
    saving = set[Future[None]]()
    while (received := channel.receive())[0] is not Call.END:
        if received[0] is Call.SAVE:
            saving.add(backend.save(Path(received[1].decode())))
        else:
            _repeat(backend, objective, *received)
    wait(saving)  # a failure is rank 0's as well, which says so


def _repeat(backend: Backend, objective: Objective, call: Call, payload: bytes) -> None:
    match call:
        case Call.LOG_PROBS_POLICY:
            backend.log_probs(from_bytes(payload), "policy")
        case Call.LOG_PROBS_REFERENCE:
            backend.log_probs(from_bytes(payload), "reference")
        case Call.STEP:
            backend.step(from_bytes(payload), objective)
        case Call.TENSORS:
            for _ in backend.tensors():
                pass
        case Call.RESTORE:
            backend.restore(Path(payload.decode()))
