"""What the service says when its engine refuses or hangs; a fake engine that counts stands for one with a model."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from services.rollout.engine import Engine
from services.rollout.server import RolloutServicer
from services.rollout.updates import WeightKeeper
from services.rollout.worker import Limits, RolloutWorker
from tests.integration.rollout.generating import group
from tests.unit.rollout.fakes import CountingEngine
from trireme.contracts.grpc import channel
from trireme.contracts.v1 import rollout_pb2, rollout_pb2_grpc, sample_pb2
from trireme.streams.redis import RedisStreams


async def code_of(engine: CountingEngine, prompt: sample_pb2.Prompt, timeout_s: float | None) -> tuple[Any, str]:
    """How a real gRPC call on `engine` ends; the service's own limit is 0.5 s."""
    keeper = WeightKeeper(cast(Engine, engine), cast(Any, SimpleNamespace()), "run", timeout_s=0.5)
    server = grpc.aio.server()
    servicer = RolloutServicer(cast(Engine, engine), keeper, "one", timeout_s=0.5)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with channel(f"127.0.0.1:{port}") as target:
            stub, request = rollout_pb2_grpc.RolloutServiceStub(target), rollout_pb2.GenerateRequest(prompt=prompt)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(request, timeout=timeout_s):
                    pass
        return caught.value.code(), caught.value.details() or ""
    finally:
        await server.stop(None)


async def test_a_request_that_the_engine_refuses_is_the_callers_fault() -> None:
    assert await code_of(CountingEngine(), group([14]), 20) == (grpc.StatusCode.INVALID_ARGUMENT, "fourteen")
    assert await code_of(CountingEngine(), group([13]), 20) == (grpc.StatusCode.INTERNAL, "thirteen")


async def test_a_call_without_a_deadline_has_the_services() -> None:
    engine = CountingEngine()
    engine.release.clear()
    async with asyncio.timeout(20):
        code, details = await code_of(engine, group([1]), None)
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED and "not done in 0.5 s" in details
    assert engine.aborted


async def test_a_prompt_that_the_engine_refuses_goes_to_the_dead_letters(redis_url: str, run_name: str) -> None:
    """At once, with the reason: tried again it would be refused again."""
    engine = cast(Engine, CountingEngine())
    keeper = WeightKeeper(engine, cast(Any, SimpleNamespace()), run_name, timeout_s=5)
    async with RedisStreams(redis_url, run_name) as at:
        await at.prompts.put(group([14]).SerializeToString())
        await at.prompts.put(group([1]).SerializeToString())
        limits = Limits(concurrency=4, backlog=100, timeout_s=5)
        worker = RolloutWorker(engine, keeper, at.prompts, at.samples, "w", limits)
        working = asyncio.create_task(worker.run())
        async with asyncio.timeout(20):
            while await at.prompts.depth():
                await asyncio.sleep(0.05)
        worker.stop()
        await working
        assert [letter.reason for letter in await at.dead.read()] == ["rollout: fourteen"]
        assert await at.samples.depth() == 2
