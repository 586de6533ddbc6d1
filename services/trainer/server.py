"""The trainer's gRPC service: status, weights for rollout servers, and the request to drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from trireme.contracts.v1 import trainer_pb2, trainer_pb2_grpc, weights_pb2
from trireme.weights.base import Transport
from trireme.weights.serving import WeightsUnavailable, stream_chunks

SERVICE_NAME = "trireme.v1.TrainerService"


@dataclass
class LoopState:
    """What the loop tells the world about itself. Written by the loop, read by the server."""

    run: str
    max_steps: int
    step: int = 0
    weight_version: int = 0
    phase: str = "starting"
    groups_in_flight: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    drain: asyncio.Event = field(default_factory=asyncio.Event)


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers from the loop's state and from the weights that the transport has on offer."""

    def __init__(self, state: LoopState, chunk_bytes: int) -> None:
        self._state, self._chunk_bytes = state, chunk_bytes
        self.transport: Transport | None = None  # made once the server's own address is known

    async def GetStatus(
        self, request: trainer_pb2.TrainerStatusRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.TrainerStatus:
        state = self._state
        return trainer_pb2.TrainerStatus(
            run=state.run,
            step=state.step,
            max_steps=state.max_steps,
            weight_version=state.weight_version,
            phase=state.phase,
            groups_in_flight=state.groups_in_flight,
            metrics=state.metrics,
        )

    async def FetchWeights(
        self, request: trainer_pb2.FetchWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[weights_pb2.WeightChunk]:
        if self.transport is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the trainer has published nothing yet")
        try:
            async for chunk in stream_chunks(self.transport, request.version, self._chunk_bytes):
                yield chunk
        except WeightsUnavailable as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))

    async def Drain(
        self, request: trainer_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.DrainResponse:
        self._state.drain.set()
        finishing = self._state.phase in ("training", "publishing", "checkpointing")
        return trainer_pb2.DrainResponse(step=self._state.step + (1 if finishing else 0))
