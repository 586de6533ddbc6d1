"""Real gRPC between a client and a server: limits, keepalive, health, reflection, deadlines, forks."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from trireme.contracts import grpc as ours
from trireme.contracts.v1 import reward_pb2, reward_pb2_grpc

SERVICE = "trireme.v1.RewardService"
FIVE_MIB = 5 * 1024 * 1024


class Echo(reward_pb2_grpc.RewardServiceServicer):
    """Answers with what it was asked; the id says how many seconds later."""

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        await asyncio.sleep(float(request.id or 0))
        return reward_pb2.ScoreResponse(id=request.response_text)


@pytest_asyncio.fixture
async def address() -> AsyncIterator[str]:
    services = [(reward_pb2_grpc.add_RewardServiceServicer_to_server, Echo(), SERVICE)]
    server, port = await ours.serve(services, "127.0.0.1", 0)
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_five_mib_each_way(address: str) -> None:
    """Q-01: above gRPC's 4 MiB, in both directions."""
    async with ours.channel(address) as channel:
        request = reward_pb2.ScoreRequest(response_text="x" * FIVE_MIB)
        answer = await reward_pb2_grpc.RewardServiceStub(channel).Score(request, timeout=30.0)
    assert len(answer.id) == FIVE_MIB


async def test_both_sides_must_raise_the_limit(address: str) -> None:
    """Q-01: a client with gRPC's own limits sends 5 MiB to our server, and cannot take them back."""
    async with grpc.aio.insecure_channel(address) as channel:
        request = reward_pb2.ScoreRequest(response_text="x" * FIVE_MIB)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reward_pb2_grpc.RewardServiceStub(channel).Score(request, timeout=30.0)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "4194304" in (caught.value.details() or "")


async def test_blocking_channel_has_the_same_limits(address: str) -> None:
    """Q-01, for code that is not asyncio."""
    request = reward_pb2.ScoreRequest(response_text="x" * FIVE_MIB)

    def call() -> int:
        with ours.sync_channel(address) as channel:
            return len(reward_pb2_grpc.RewardServiceStub(channel).Score(request, timeout=30.0).id)

    assert await asyncio.to_thread(call) == FIVE_MIB


async def _idle_call(server_options: Any, client_options: Any) -> str:
    """One call of 6 s without data, through five pings: gRPC sends at most one a second."""
    server = grpc.aio.server(options=server_options)
    reward_pb2_grpc.add_RewardServiceServicer_to_server(Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client_options) as channel:
            request = reward_pb2.ScoreRequest(id="6", response_text="fine")
            answer = await reward_pb2_grpc.RewardServiceStub(channel).Score(request, timeout=10.0)
            return str(answer.id)
    except grpc.aio.AioRpcError as error:
        return error.details() or ""
    finally:
        await server.stop(None)


async def test_keepalive_is_agreed() -> None:
    """Our options at a thirtieth of their times bear the client's pings; gRPC's own server calls the client off."""
    scaled = ours.options(
        keepalive_time_ms=ours.KEEPALIVE_TIME_MS // 30, min_ping_interval_ms=ours.MIN_PING_INTERVAL_MS // 30
    )
    agreed, not_agreed = await asyncio.gather(_idle_call(scaled, scaled), _idle_call((), scaled))
    assert agreed == "fine"
    assert "too_many_pings" in not_agreed.lower().replace(" ", "_")


async def test_health_names_every_service(address: str) -> None:
    async with ours.channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=20)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_caller_may_own_the_health() -> None:
    """A service that loads a model says itself when it is ready."""
    health = ours.HealthServicer()
    await health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    server, port = await ours.serve([], "127.0.0.1", 0, health_servicer=health)
    async with ours.channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
    await server.stop(None)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_reflection_lists_the_services(address: str) -> None:
    async with ours.channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = stub.ServerReflectionInfo(iter([request]), timeout=ours.STATUS_DEADLINE_S)
        names = {service.name async for answer in answers for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_taken_port_is_named(free_port: int) -> None:
    """Another server, of gRPC or not, on the port is an error, not a share of its connections."""
    server, _ = await ours.serve([], "127.0.0.1", free_port)
    with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{free_port}: .*another process listens there"):
        await ours.serve([], "127.0.0.1", free_port)
    await server.stop(None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=rf"127.0.0.1:{port}"):
            await ours.serve([], "127.0.0.1", port)


async def test_a_call_without_a_deadline_ends(address: str) -> None:
    """The channel has a last resort, for callers that are not type-checked."""
    options = ours.options(longest_call_s=0.5)
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call: Any = reward_pb2_grpc.RewardServiceStub(channel).Score
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call(reward_pb2.ScoreRequest(id="20")), 10)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


FORKED = """
import os, sys
from trireme.contracts import grpc as ours
from trireme.contracts.v1 import reward_pb2, reward_pb2_grpc

def call(channel, text):
    request = reward_pb2.ScoreRequest(response_text=text)
    return reward_pb2_grpc.RewardServiceStub(channel).Score(request, timeout=5.0).id

channel = ours.sync_channel(sys.argv[1])
print(call(channel, "before"), flush=True)
child = os.fork()
if child == 0:
    try:
        print(call(channel, "hangs"), flush=True)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(call(channel, "after"), flush=True)
"""


async def test_channel_after_fork_is_an_error(address: str) -> None:
    """Q-03: in the child the parent's channel says what is wrong instead of hanging; in the parent it goes on."""
    command = [sys.executable, "-c", FORKED, address]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30)
    before, child, after = done.stdout.splitlines()
    assert (before, after) == ("before", "after")
    assert "before a fork: make it in the child" in child


def _in_child(address: str, text: str) -> str:
    with ours.sync_channel(address) as channel:
        request = reward_pb2.ScoreRequest(response_text=text)
        return reward_pb2_grpc.RewardServiceStub(channel).Score(request, timeout=10.0).id  # type: ignore[no-any-return]


SPAWNED = f"""
import sys, multiprocessing
sys.path.insert(0, {str(__file__.rpartition("/")[0])!r})
from test_grpc import _in_child

if __name__ == "__main__":
    print(_in_child(sys.argv[1], "parent"))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply_async(_in_child, (sys.argv[1], "child")).get(30))
"""


async def test_spawned_child_makes_its_own_channel(address: str, tmp_path: Any) -> None:
    """Q-03: what works, after the parent has used gRPC."""
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    command = [sys.executable, str(script), address]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": "."}
    )
    assert done.stdout.split() == ["parent", "child"], done.stderr
