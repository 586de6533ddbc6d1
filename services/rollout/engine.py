"""The Engine port: a model that generates tokens from tokens, under weights that change by versions.

`vllm_engine.py` implements it with vLLM. The rest of the service (groups, weight updates, server, worker) knows
only this file.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

from trireme.contracts.v1.sample_pb2 import VersionSpan
from trireme.weights.segment import Segment

Finish = Literal["stop", "length", "aborted"]


class EngineError(RuntimeError):
    """The engine could not do what was asked; it goes on working."""


class EngineDeadError(EngineError):
    """The engine is gone and will not come back: the process has to be replaced."""


class RequestRefused(EngineError):
    """The engine will never generate from this request."""


class WeightLoadError(EngineError):
    """New weights were not taken. `intact`: whether the engine still has its old ones, whole."""

    def __init__(self, message: str, *, intact: bool) -> None:
        super().__init__(message)
        self.intact = intact


@dataclass(frozen=True)
class Request:
    """One completion to generate. `seed` decides every draw; `stop_token_ids` are on top of the model's EOS ids.

    `ignore_eos`: the model's own EOS ids do not end it.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    seed: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Delta:
    """Tokens sampled since the last delta, with the log-prob of each."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


@dataclass(frozen=True)
class Completion:
    """A finished response of N tokens, the one that ended it included.

    log_probs: N, after temperature and filters. versions: spans that cover the N tokens. text: decoded, without
    special tokens.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish: Finish
    text: str


@dataclass(frozen=True)
class Pressure:
    """How busy the engine is: requests in the running batch and waiting for it, and the used share of its cache."""

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0


class Engine(Protocol):
    """What the service needs of an engine."""

    model: str
    max_model_len: int
    vocab_size: int

    @property
    def version(self) -> int:
        """The weight version that tokens sampled now belong to; 0 for the weights it started with."""
        ...

    def generate(self, request: Request, *, stream: bool = False) -> AsyncIterator[Delta | Completion]:
        """Deltas if `stream`, then exactly one Completion. Closing the iterator aborts the request.

        Raises EngineDeadError when the engine is gone and EngineError when this request alone failed.
        """
        ...

    async def pause(self, *, wait: bool) -> None:
        """Sample nothing more until `resume`: once running requests are finished (`wait`), or at once."""
        ...

    async def resume(self) -> None:
        """Go on, with the requests that were frozen or came meanwhile."""
        ...

    async def load(self, version: int, segment: Segment, *, in_flight: bool) -> None:
        """Swap to `version`, with a prefix cache that holds nothing older, and stamp what follows with it.

        `in_flight` freezes running requests for the swap; else they finish first. Raises WeightLoadError; when that
        says not `intact`, running requests were aborted and the engine generates nothing until a load succeeds.
        """
        ...

    async def reset_cache(self, *, running_too: bool) -> None:
        """Empty the prefix cache. Raises EngineError when it still holds something after some tries."""
        ...

    def pressure(self) -> Pressure:
        """The load as of the last engine step."""
        ...

    def failure(self) -> str | None:
        """Why the engine is dead, or None while it lives."""
        ...

    async def close(self) -> None:
        """Stop the engine and its processes."""
        ...
