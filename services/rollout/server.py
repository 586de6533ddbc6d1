"""The gRPC face of the rollout service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc

from services.rollout import groups
from services.rollout.engine import Engine, EngineDeadError, EngineError, RequestRefused
from services.rollout.metrics import UPDATE_SECONDS, UPDATES, count_sample
from services.rollout.updates import NotCaughtUp, StaleVersion, UpdateFailed, WeightKeeper
from trireme.contracts.v1 import rollout_pb2, rollout_pb2_grpc, sample_pb2

SERVICE_NAME = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
# Left of a call's deadline when waiting for weights is given up, so that the caller learns why.
ANSWER_SHARE, LONGEST_ANSWER_S = 0.2, 5.0

Context = grpc.aio.ServicerContext[Any, Any]
CODES: list[tuple[type[Exception], grpc.StatusCode]] = [
    (groups.InvalidPrompt, grpc.StatusCode.INVALID_ARGUMENT),
    (NotCaughtUp, grpc.StatusCode.FAILED_PRECONDITION),
    (StaleVersion, grpc.StatusCode.FAILED_PRECONDITION),
    (UpdateFailed, grpc.StatusCode.INTERNAL),
    (EngineDeadError, grpc.StatusCode.UNAVAILABLE),
    (RequestRefused, grpc.StatusCode.INVALID_ARGUMENT),
    (EngineError, grpc.StatusCode.INTERNAL),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
]


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Generates groups, takes weights, tells its state. `timeout_s` bounds calls whose caller set no deadline."""

    def __init__(self, engine: Engine, keeper: WeightKeeper, name: str, *, timeout_s: float) -> None:
        self._engine, self._keeper, self._name, self._timeout_s = engine, keeper, name, timeout_s
        self._generated = 0

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        prompt = request.prompt
        try:
            groups.check(prompt, self._engine)
            async with asyncio.timeout(self._timeout_s if context.time_remaining() is None else None):
                await self._ready(prompt, context)
                async for event in groups.generate(self._engine, prompt, self._name, stream=request.stream_tokens):
                    if isinstance(event, sample_pb2.Sample):
                        self._count(event)
                        yield rollout_pb2.GenerateResponse(sample=event)
                    else:
                        yield rollout_pb2.GenerateResponse(delta=event)
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"not done in {self._timeout_s:g} s, the limit of calls without one"
            )
        except tuple(kind for kind, _ in CODES) as error:
            await _abort(context, error)

    async def UpdateWeights(
        self, request: rollout_pb2.UpdateWeightsRequest, context: Context
    ) -> rollout_pb2.UpdateWeightsResponse:
        try:
            done = await self._keeper.update(request.manifest, in_flight=request.in_flight)
        except tuple(kind for kind, _ in CODES) as error:
            UPDATES.labels("failed").inc()
            await _abort(context, error)
        UPDATES.labels("done").inc()
        UPDATE_SECONDS.observe(done.fetch_s + done.load_s)
        return rollout_pb2.UpdateWeightsResponse(version=done.version, fetch_s=done.fetch_s, load_s=done.load_s)

    async def GetStatus(self, request: rollout_pb2.RolloutStatusRequest, context: Context) -> rollout_pb2.RolloutStatus:
        pressure = self._engine.pressure()
        return rollout_pb2.RolloutStatus(
            name=self._name,
            model=self._engine.model,
            weight_version=self._keeper.version,
            running=pressure.running,
            waiting=pressure.waiting,
            generated_tokens=self._generated,
        )

    def count_tokens(self, tokens: int) -> None:
        """Tokens that the stream worker generated, for GetStatus."""
        self._generated += tokens

    async def _ready(self, prompt: sample_pb2.Prompt, context: Context) -> None:
        """Wait for the weights that the prompt demands. Raises NotCaughtUp shortly before the call's deadline."""
        await self._keeper.wait_for(prompt.min_weight_version, self._patience(context.time_remaining()))

    def _patience(self, remaining: float | None) -> float:
        """How long to wait in a call with `remaining` seconds left (None: it has no deadline)."""
        if remaining is None:
            return self._timeout_s
        return min(self._timeout_s, remaining - min(LONGEST_ANSWER_S, ANSWER_SHARE * remaining))

    def _count(self, sample: sample_pb2.Sample) -> None:
        count_sample(sample)
        self.count_tokens(len(sample.response_token_ids))


async def _abort(context: Context, error: Exception) -> NoReturn:
    code = next(code for kind, code in CODES if isinstance(error, kind))
    await context.abort(code, str(error))
