"""A verifier that does to its process whatever the response says."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any, ClassVar

from pydantic import Field

from services.reward.verifiers.base import Outcome, Payload, PolicyFailure, Request, Score


class MisbehavingPayload(Payload):
    seconds: float = Field(default=0.0, description="how long to take")
    once: str | None = Field(default=None, description="a file: misbehave only while it does not exist")


class Misbehaving:
    name: ClassVar[str] = "misbehaving"
    version: ClassVar[str] = "7"
    schema: ClassVar[type[MisbehavingPayload]] = MisbehavingPayload
    stateless: ClassVar[bool] = True

    def score(self, request: Request) -> Outcome:
        task = request.payload
        assert isinstance(task, MisbehavingPayload)
        if task.once and os.path.exists(task.once):
            return Score(0.5)
        if task.once:
            open(task.once, "w").close()
        time.sleep(task.seconds)
        result: Any = ACTS[request.response_text]()
        return result


def _exhaust_memory() -> Outcome:
    hoard = []
    while True:
        hoard.append(bytearray(1 << 27))


def _fork_and_die() -> Outcome:
    """What it started keeps its pipes open."""
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    os._exit(4)


def _raise() -> Outcome:
    raise RuntimeError("out of sorts")


def _hold_the_lock() -> Outcome:
    """C code that never returns and never releases the interpreter lock: no thread or signal handler can stop it."""
    ctypes.PyDLL(None).sleep(1000)
    return Score(1.0)


ACTS = {
    "score": lambda: Score(1.0, {"part": 0.25}),
    "zero": lambda: Score(0.0),
    "policy": lambda: PolicyFailure("forbidden word"),
    "exit": lambda: os._exit(3),
    "fork": _fork_and_die,
    "redis": lambda: Score(float("TRIREME_REDIS_URL" in os.environ)),
    "surrogate": lambda: PolicyFailure("quotes \ud800"),
    "segfault": lambda: ctypes.string_at(0),
    "memory": _exhaust_memory,
    "raise": _raise,
    "hang": _hold_the_lock,
    "none": lambda: None,
    "number": lambda: 1.0,
    "nan": lambda: Score(float("nan")),
    "infinite": lambda: Score(1.0, {"part": float("inf")}),
    "text": lambda: Score("much"),  # type: ignore[arg-type]
    "print": lambda: print("noise" * 1000) or Score(1.0),  # type: ignore[func-returns-value]
    "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
}


class NoLibrary(Misbehaving):
    name = "no_library"

    def load(self) -> None:
        import no_such_library  # noqa: F401
