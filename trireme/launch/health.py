"""Looking at a run from outside: which service answers where. Blocking calls with short deadlines."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.exceptions import RedisError

from trireme.contracts.grpc import DRAIN_DEADLINE_S, HEALTH_DEADLINE_S, STATUS_DEADLINE_S, sync_channel
from trireme.contracts.v1 import trainer_pb2, trainer_pb2_grpc
from trireme.launch.process import Process
from trireme.registry import Kind, Registry, ServiceRecord
from trireme.streams.connection import open_client
from trireme.streams.errors import StreamsError

CLOCK_SLACK_S = 1.0  # a record's start may be stamped with a coarser clock than ours


class RegistryProbe:
    """Supervisor's probe: a process is ready when its record in the registry is its own and its gRPC health says so."""

    def __init__(self, redis_url: str, run: str) -> None:
        self._runner = asyncio.Runner()
        self._client = open_client(redis_url, STATUS_DEADLINE_S)
        self._registry = Registry(self._client, run)
        self._answered_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    def ready(self, process: Process) -> bool:
        record = self.record(process)
        return record is not None and serving(record.address)

    def record(self, process: Process) -> ServiceRecord | None:
        """What `process` itself announced: records of an earlier process of its name do not count."""
        newest = process.started_unix_s - CLOCK_SLACK_S
        found = (r for r in self.records(process.spec.kind) if r.name == process.spec.name)
        return next((record for record in found if record.started_unix_s >= newest), None)

    def records(self, kind: Kind | None = None) -> list[ServiceRecord]:
        """Empty when Redis does not answer now."""
        if not self._redis_answers():
            return []
        try:
            return self._runner.run(self._registry.list(kind))
        except (StreamsError, RedisError):
            return []

    def redis_silent_s(self) -> float:
        """Seconds since Redis answered last, 0 when it does now."""
        return 0.0 if self._redis_answers() else time.monotonic() - self._answered_s

    def _redis_answers(self) -> bool:
        """Asked without the patience of the registry: the supervisor has processes to look after meanwhile."""
        try:
            self._runner.run(self._ping())
        except (RedisError, OSError, TimeoutError):
            return False
        self._answered_s = time.monotonic()
        return True

    async def _ping(self) -> None:
        await self._client.ping()


def serving(address: str) -> bool:
    """Whether the gRPC server at `address` says that it serves."""
    with sync_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=HEALTH_DEADLINE_S
            )
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def trainer_status(address: str) -> trainer_pb2.TrainerStatus | None:
    """None when it does not answer now."""
    with sync_channel(address) as channel:
        try:
            return trainer_pb2_grpc.TrainerServiceStub(channel).GetStatus(
                trainer_pb2.TrainerStatusRequest(), timeout=HEALTH_DEADLINE_S
            )
        except grpc.RpcError:
            return None


def drain_trainer(address: str) -> bool:
    """Ask the trainer to finish its step, checkpoint and end; whether it said that it will."""
    with sync_channel(address) as channel:
        try:
            trainer_pb2_grpc.TrainerServiceStub(channel).Drain(trainer_pb2.DrainRequest(), timeout=DRAIN_DEADLINE_S)
        except grpc.RpcError:
            return False
    return True
