"""The rollout service put together: engine, weights, gRPC server, stream worker, registry, metrics; and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from grpc_health.v1 import health, health_pb2

from services.rollout.engine import Engine, EngineDeadError
from services.rollout.metrics import IN_ROTATION, WEIGHT_VERSION
from services.rollout.server import SERVICE_NAME, RolloutServicer
from services.rollout.settings import engine_settings
from services.rollout.updates import UpdateFailed, WeightKeeper
from services.rollout.vllm_engine import VllmEngine
from services.rollout.worker import Limits, RolloutWorker
from trireme.config import Config, ConfigError
from trireme.contracts.grpc import serve
from trireme.contracts.v1 import rollout_pb2_grpc
from trireme.registry import ANNOUNCE_EVERY_S, Registry, ServiceRecord
from trireme.streams.errors import StreamsError
from trireme.streams.redis import RedisStreams
from trireme.telemetry.http import serve_http
from trireme.weights.choose import receiver

log = logging.getLogger(__name__)

GRACE_S = 5.0  # for gRPC calls under way when the service ends
DRAIN_S = 60.0  # for groups under way; what is not done by then is given back to the stream
WATCH_EVERY_S = 0.5
# Samples may pile up to this many times the work of one server before it takes no more prompts.
BACKLOG_FACTOR = 4

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True)
class Service:
    """The running parts, for those that report on them."""

    config: Config
    name: str
    engine: Engine
    keeper: WeightKeeper
    servicer: RolloutServicer
    worker: RolloutWorker
    registry: Registry


async def run(config: Config, name: str) -> None:
    """Serve until SIGTERM or SIGINT, then finish what was taken.

    Raises ConfigError, StreamsError, OSError or what vLLM raises when the service cannot start; EngineDeadError when
    the engine died.
    """
    if config.redis.url is None:
        raise ConfigError("redis.url: is null; set it or TRIREME_REDIS_URL to the Redis server of the run")
    settings = engine_settings(config)
    async with AsyncExitStack() as stack:
        streams = await stack.enter_async_context(_streams(config))
        engine = await VllmEngine.start(settings)
        stack.push_async_callback(engine.close)
        # After the engine: vLLM installs handlers of its own while it starts.
        stopping = stop_on_signals()
        service = assemble(config, name, engine, streams)
        await _first_weights(service)
        record = await stack.enter_async_context(_serving(service))
        await stack.enter_async_context(_announced(service, record))
        log.info("ready at %s with weight version %d", record.address, engine.version)
        await _work(service, stopping)


def assemble(config: Config, name: str, engine: Engine, streams: RedisStreams) -> Service:
    """Wire the parts around an engine."""
    run_name, block = config.run.name, config.rollout
    keeper = WeightKeeper(
        engine,
        receiver(run_name),
        run_name,
        timeout_s=config.weights.timeout_s,
        in_flight=config.grpo.async_grpo.in_flight_weight_updates,
    )
    servicer = RolloutServicer(engine, keeper, name, timeout_s=block.request_timeout_s)
    limits = Limits(
        concurrency=block.max_concurrent_groups,
        backlog=BACKLOG_FACTOR * block.max_concurrent_groups * config.grpo.num_generations_per_prompt,
        timeout_s=block.request_timeout_s,
    )
    worker = RolloutWorker(
        engine, keeper, streams.prompts, streams.samples, name, limits, generated=servicer.count_tokens
    )
    return Service(config, name, engine, keeper, servicer, worker, Registry(streams.client, run_name))


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


def _streams(config: Config) -> RedisStreams:
    assert config.redis.url is not None
    return RedisStreams(
        config.redis.url,
        config.run.name,
        lease_s=config.stream.lease_s,
        max_deliveries=config.stream.max_deliveries,
        connect_timeout_s=config.redis.connect_timeout_s,
    )


async def _first_weights(service: Service) -> None:
    """A late joiner begins with the newest weights, if it can get them."""
    try:
        await service.keeper.catch_up(service.registry.get_manifest)
    except (UpdateFailed, ValueError) as error:
        log.warning("starting without the newest weights: %s", error)


async def _work(service: Service, stopping: asyncio.Event) -> None:
    """Work until `stopping`, then let the worker finish. Raises what ended a part before that."""
    async with _background(service.keeper.keep_up(service.registry.get_manifest), _watch(service.engine)) as parts:
        working = asyncio.create_task(service.worker.run())
        signalled = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait([working, signalled, *parts], return_when=asyncio.FIRST_COMPLETED)
            log.info("stopping with %d groups under way", service.worker.running)
            service.worker.stop()
            if not any(part.done() for part in parts):
                await asyncio.wait([working, *parts], timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            signalled.cancel()
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working
        for part in parts:
            if part.done():
                part.result()


@asynccontextmanager
async def _background(*parts: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(engine: Engine) -> None:
    """Raise EngineDeadError when the engine dies: only a new process has a new engine."""
    while (reason := engine.failure()) is None:
        await asyncio.sleep(WATCH_EVERY_S)
    raise EngineDeadError(reason)


@asynccontextmanager
async def _serving(service: Service) -> AsyncIterator[ServiceRecord]:
    """gRPC and HTTP for the length of the block; yields how the service is found."""
    block, started = service.config.rollout, time.time()
    health_servicer: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]  # its stubs lack asyncio
    add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
    services = [(add, service.servicer, SERVICE_NAME)]
    server, port = await serve(services, block.host, block.port, health_servicer=health_servicer)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, GRACE_S)
        http, metrics_port = await serve_http(block.host, block.metrics_port, lambda: _health(service))
        stack.push_async_callback(http.stop)
        await stack.enter_async_context(_background(_report(service, health_servicer)))
        stack.push_async_callback(health_servicer.enter_graceful_shutdown)
        yield ServiceRecord(
            kind="rollout",
            name=service.name,
            address=f"{block.reachable_host}:{port}",
            metrics_address=f"{block.reachable_host}:{metrics_port}",
            pid=os.getpid(),
            weight_version=service.engine.version,
            state=_state(service),
            started_unix_s=started,
            model=service.engine.model,
        )


def _health(service: Service) -> tuple[bool, dict[str, object]]:
    problem = service.engine.failure() or service.keeper.problem
    facts: dict[str, object] = {"weight_version": service.keeper.version, "groups": service.worker.running}
    return problem is None, facts | ({"problem": problem} if problem else {})


def _state(service: Service) -> str:
    if not service.keeper.serving:
        return "out of rotation"
    return "behind" if service.keeper.behind else "serving"


async def _report(service: Service, health_servicer: Any) -> None:
    """Tell health and metrics of every change of version and rotation."""
    async for _ in service.keeper.changes():
        for name in ("", SERVICE_NAME):
            await health_servicer.set(name, SERVING if service.keeper.serving else NOT_SERVING)
        IN_ROTATION.set(service.keeper.serving)
        WEIGHT_VERSION.set(service.keeper.version)


@asynccontextmanager
async def _announced(service: Service, record: ServiceRecord) -> AsyncIterator[None]:
    """Be found in the registry for the length of the block."""
    await service.registry.announce(record)
    async with _background(_keep_announcing(service, record)):
        try:
            yield
        finally:
            with suppress(StreamsError):  # the record ends by itself
                await service.registry.withdraw(record)


async def _keep_announcing(service: Service, record: ServiceRecord) -> None:
    """Renew the record, at once when the version or the state changes."""
    told = record
    while True:
        for _ in range(round(ANNOUNCE_EVERY_S / WATCH_EVERY_S)):
            await asyncio.sleep(WATCH_EVERY_S)
            now = replace(record, weight_version=service.keeper.version, state=_state(service))
            if now != told:
                break
        try:
            await service.registry.announce(now)
            told = now
        except StreamsError as error:
            log.warning("cannot announce: %s", error)
