"""The gRPC face of the service: trireme.v1.RewardService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable

import grpc

from services.reward.service import BadRequest, Scoring, schema_json
from trireme.contracts.v1 import reward_pb2, reward_pb2_grpc

SERVICE_NAME = "trireme.v1.RewardService"
# Requests of one stream that are scored or wait for a process at once; more are left in the connection.
STREAM_WINDOW = 256

# As the generated base class has it; here it is always the asynchronous one.
Requests = Iterable[reward_pb2.ScoreRequest] | AsyncIterable[reward_pb2.ScoreRequest]
LONGEST_DETAILS = 1000  # a message that quotes the request must fit into HTTP headers


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """When a call's deadline passes, gRPC cancels it, which stops its scoring and frees the process."""

    def __init__(self, scoring: Scoring, stream_window: int = STREAM_WINDOW) -> None:
        self._scoring, self._window = scoring, stream_window

    async def Score(
        self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ScoreResponse:
        try:
            return await self._score(request)
        except BadRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:LONGEST_DETAILS])

    async def ScoreStream(
        self, request_iterator: Requests, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[reward_pb2.ScoreResponse]:
        """A bad request ends the stream with its id and what is wrong with it."""
        assert isinstance(request_iterator, AsyncIterable)
        try:
            async for response in self._as_ready(aiter(request_iterator)):
                yield response
        except BadRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:LONGEST_DETAILS])

    async def ListVerifiers(
        self, request: reward_pb2.ListVerifiersRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ListVerifiersResponse:
        infos = [
            reward_pb2.VerifierInfo(
                name=v.name, version=v.version, payload_schema_json=schema_json(v), stateless=v.stateless
            )
            for v in self._scoring.verifiers
        ]
        return reward_pb2.ListVerifiersResponse(verifiers=infos)

    async def _score(self, request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        try:
            return reward_pb2.ScoreResponse(id=request.id, reward=await self._scoring.score(request))
        except BadRequest as error:
            raise BadRequest(f'request "{request.id}": {error}') from error

    async def _as_ready(
        self, requests: AsyncIterator[reward_pb2.ScoreRequest]
    ) -> AsyncIterator[reward_pb2.ScoreResponse]:
        """Responses in the order in which they are ready, reading on while fewer than the window are under way."""
        scoring: set[asyncio.Task[reward_pb2.ScoreResponse]] = set()
        reading: asyncio.Task[reward_pb2.ScoreRequest | None] | None = _next(requests)
        try:
            while reading or scoring:
                room = {reading} if reading and len(scoring) < self._window else set()
                await asyncio.wait([*scoring, *room], return_when=asyncio.FIRST_COMPLETED)
                if reading and reading.done():
                    request = reading.result()
                    if request is not None:
                        scoring.add(asyncio.create_task(self._score(request)))
                    reading = _next(requests) if request is not None else None
                for task in [task for task in scoring if task.done()]:
                    scoring.discard(task)
                    yield task.result()
        finally:
            for unfinished in [*scoring, *([reading] if reading else [])]:
                unfinished.cancel()


def _next(requests: AsyncIterator[reward_pb2.ScoreRequest]) -> asyncio.Task[reward_pb2.ScoreRequest | None]:
    """The next request, None at the end."""

    async def read() -> reward_pb2.ScoreRequest | None:
        return await anext(requests, None)

    return asyncio.create_task(read())
