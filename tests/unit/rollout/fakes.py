"""An engine without a model: it counts up from the prompt. A second implementation of the port, for logic alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from services.rollout.engine import Completion, Delta, EngineError, Pressure, Request, RequestRefused, WeightLoadError
from trireme.contracts.v1.sample_pb2 import VersionSpan
from trireme.weights.segment import Segment


class CountingEngine:
    """Answers prompt [.., t] with t+1, t+2, ... `release` holds back its answers, `loads` lists what it was given."""

    model, max_model_len, vocab_size = "counting", 16, 100

    def __init__(self) -> None:
        self.version = 0
        self.loads: list[int] = []
        self.release = asyncio.Event()
        self.release.set()
        self.started: list[Request] = []
        self.aborted: list[str] = []
        self.fail_load: WeightLoadError | None = None
        self.log_prob = -0.5
        self.dead: str | None = None

    async def generate(self, request: Request, *, stream: bool = False) -> AsyncIterator[Delta | Completion]:
        self.started.append(request)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.aborted.append(request.id)
            raise
        if 13 in request.prompt_token_ids:
            raise EngineError("thirteen")
        if 14 in request.prompt_token_ids:
            raise RequestRefused("fourteen")
        ids = tuple(request.prompt_token_ids[-1] + 1 + i for i in range(request.max_new_tokens))
        log_probs = tuple(self.log_prob for _ in ids)
        if stream:
            yield Delta(ids, log_probs)
        spans = (VersionSpan(start=0, length=len(ids), version=self.version),)
        yield Completion(ids, log_probs, spans, "length", "text")

    async def pause(self, *, wait: bool) -> None: ...

    async def resume(self) -> None: ...

    async def load(self, version: int, segment: Segment, *, in_flight: bool) -> None:
        await asyncio.sleep(0.02)
        if self.fail_load:
            raise self.fail_load
        self.loads.append(version)
        self.version = version

    async def reset_cache(self, *, running_too: bool) -> None: ...

    def pressure(self) -> Pressure:
        return Pressure()

    def failure(self) -> str | None:
        return self.dead

    async def close(self) -> None: ...
