"""The reward service put together: verifiers, pool, gRPC server, stream worker, registry, metrics; and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

from services.reward.pool import PoolSettings, VerifierPool
from services.reward.server import SERVICE_NAME, RewardServicer
from services.reward.service import Scoring
from services.reward.verifiers.registry import Registry as Verifiers
from services.reward.worker import RewardWorker
from trireme.config import Config
from trireme.contracts.grpc import serve
from trireme.contracts.v1 import reward_pb2_grpc
from trireme.registry import ANNOUNCE_EVERY_S, Registry, ServiceRecord
from trireme.streams.errors import StreamsError
from trireme.streams.redis import RedisStreams
from trireme.telemetry.http import serve_http

log = logging.getLogger(__name__)

ENTRIES_PER_PROCESS = 4  # taken ahead, so that no process waits for Redis; few, so that a kill delays few
GRACE_S = 5.0  # for gRPC calls under way when the service ends
DRAIN_S = 60.0  # for samples under way; what is not done by then is left to another worker


class NotConfigured(ValueError):
    """The configuration lacks what this service needs; the text names the key."""


def pool_settings(config: Config) -> PoolSettings:
    block = config.reward
    return PoolSettings(
        workers=block.workers,
        timeout_s=block.timeout_s,
        max_attempts=block.max_attempts,
        memory_mib=block.memory_mib,
        verifiers=tuple(block.verifiers or ()),
    )


async def run(config: Config, name: str) -> None:
    """Serve until SIGTERM or SIGINT, then finish what was taken.

    Raises VerifierError, NotConfigured, StreamsError or OSError when the service cannot start, and whatever ended
    the worker when that was not a signal.
    """
    if config.redis.url is None:
        raise NotConfigured("redis.url: is null; set it or TRIREME_REDIS_URL to the Redis server of the run")
    stopping = stop_on_signals()
    settings = pool_settings(config)
    verifiers = Verifiers(settings.verifiers)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(VerifierPool(settings))
        await pool.start()
        streams = await stack.enter_async_context(
            RedisStreams(
                config.redis.url,
                config.run.name,
                lease_s=config.stream.lease_s,
                max_deliveries=config.stream.max_deliveries,
                connect_timeout_s=config.redis.connect_timeout_s,
            )
        )
        scoring = Scoring(verifiers, pool)
        worker = RewardWorker(
            scoring,
            streams.samples,
            streams.scored,
            concurrency=settings.workers * ENTRIES_PER_PROCESS,
            lease_s=config.stream.lease_s,
        )
        record = await stack.enter_async_context(_serving(config, name, scoring, worker))
        await stack.enter_async_context(_announced(Registry(streams.client, config.run.name), record))
        log.info("ready at %s with %s", record.address, ", ".join(verifiers.names()))
        await _work(worker, stopping)


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


async def _work(worker: RewardWorker, stopping: asyncio.Event) -> None:
    """Run the worker until `stopping`, then give it time to finish. Raises what ended the worker before that."""
    working = asyncio.create_task(worker.run())
    signalled = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait([working, signalled], return_when=asyncio.FIRST_COMPLETED)
        log.info("stopping with %d samples under way", worker.running)
        worker.stop()
        await asyncio.wait([working], timeout=DRAIN_S)
    finally:
        signalled.cancel()
        if not working.done():
            working.cancel()
    with suppress(asyncio.CancelledError):
        await working


@asynccontextmanager
async def _serving(config: Config, name: str, scoring: Scoring, worker: RewardWorker) -> AsyncIterator[ServiceRecord]:
    """gRPC and HTTP for the length of the block; yields how the service is found."""
    block, started = config.reward, time.time()

    def health() -> tuple[bool, dict[str, object]]:
        return True, {"running": worker.running, "verifiers": scoring.verifiers.names()}

    add = reward_pb2_grpc.add_RewardServiceServicer_to_server
    server, port = await serve([(add, RewardServicer(scoring), SERVICE_NAME)], block.host, block.port)
    try:
        http, metrics_port = await serve_http(block.host, block.metrics_port, health)
        try:
            yield ServiceRecord(
                kind="reward",
                name=name,
                address=f"{block.reachable_host}:{port}",
                metrics_address=f"{block.reachable_host}:{metrics_port}",
                pid=os.getpid(),
                weight_version=0,
                state="serving",
                started_unix_s=started,
            )
        finally:
            await http.stop()
    finally:
        await server.stop(GRACE_S)


@asynccontextmanager
async def _announced(registry: Registry, record: ServiceRecord) -> AsyncIterator[None]:
    """Be found in the registry for the length of the block."""
    await registry.announce(record)
    announcing = asyncio.create_task(_keep_announcing(registry, record))
    try:
        yield
    finally:
        announcing.cancel()
        with suppress(StreamsError):  # the record ends by itself
            await registry.withdraw(record)


async def _keep_announcing(registry: Registry, record: ServiceRecord) -> None:
    while True:
        await asyncio.sleep(ANNOUNCE_EVERY_S)
        try:
            await registry.announce(replace(record, state="serving"))
        except StreamsError as error:
            log.warning("cannot announce: %s", error)
