"""Who is where, on a real Redis."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import asdict, replace

import pytest
import pytest_asyncio

from trireme.registry import Registry, RunLocked, ServiceRecord
from trireme.streams import connection
from trireme.streams.connection import open_client
from trireme.streams.redis import key

RECORD = ServiceRecord(
    kind="rollout",
    name="rollout-0",
    address="127.0.0.1:50051",
    metrics_address="127.0.0.1:9100",
    pid=4242,
    weight_version=3,
    state="serving",
    started_unix_s=1796074137.123456,
    model="smol",
)


@pytest_asyncio.fixture
async def registry(redis_url: str, run_name: str) -> AsyncIterator[Registry]:
    client = open_client(redis_url)
    yield Registry(client, run_name)
    await client.aclose()


async def test_services_are_found_by_kind(registry: Registry) -> None:
    reward = replace(RECORD, kind="reward", name="reward-0")
    second = replace(RECORD, name="rollout-1")
    for record in (second, reward, RECORD):
        await registry.announce(record)
    assert await registry.list() == [reward, RECORD, second]
    assert await registry.list("rollout") == [RECORD, second]
    assert await registry.list("trainer") == []


async def test_the_latest_announcement_counts(registry: Registry) -> None:
    await registry.announce(RECORD)
    newer = replace(RECORD, weight_version=4, state="loading")
    await registry.announce(newer)
    assert await registry.list() == [newer]


async def test_the_silent_are_forgotten(registry: Registry) -> None:
    await registry.announce(RECORD, ttl_s=1)
    await asyncio.sleep(1.2)
    assert await registry.list() == []
    await registry.announce(RECORD)
    assert await registry.list() == [RECORD], "and found again when they speak"


async def test_withdrawing_spares_a_successor(registry: Registry) -> None:
    """A process that ends late must not take out the one that replaced it under its name."""
    await registry.announce(RECORD)
    successor = replace(RECORD, pid=4343, started_unix_s=RECORD.started_unix_s + 60)
    await registry.announce(successor)
    await registry.withdraw(RECORD)
    assert await registry.list() == [successor]
    await registry.withdraw(successor)
    await registry.withdraw(successor)
    assert await registry.list() == []


async def test_records_of_newer_services_are_read(registry: Registry, redis_url: str, run_name: str) -> None:
    await registry.announce(RECORD)
    client = open_client(redis_url)
    await client.set(key(run_name, "service:rollout:rollout-0"), json.dumps(asdict(RECORD) | {"zone": "b"}))
    await client.aclose()
    assert await registry.list() == [RECORD]


async def test_runs_are_apart(registry: Registry, redis_url: str) -> None:
    client = open_client(redis_url)
    await registry.announce(RECORD)
    assert await Registry(client, "another").list() == []
    await client.aclose()


async def test_the_newest_manifest_is_kept(registry: Registry) -> None:
    assert await registry.get_manifest() is None
    for manifest in (b"\x00one", b"\xfftwo"):
        await registry.set_manifest(manifest)
    assert await registry.get_manifest() == b"\xfftwo"


async def test_one_trainer_to_a_run(registry: Registry) -> None:
    async with registry.lock("hostA:1", ttl_s=3):
        await asyncio.sleep(4)  # longer than the lock lives without being renewed
        with pytest.raises(RunLocked, match=r"has a trainer already: hostA:1 .*choose another run\.name"):
            async with registry.lock("hostB:2"):
                pass
    async with registry.lock("hostB:2"):
        pass


async def test_a_restart_may_wait_for_a_dead_trainer(registry: Registry, redis_url: str, run_name: str) -> None:
    """A killed trainer leaves its lock, for as long as that lives without being renewed."""
    client = open_client(redis_url)
    await client.set(key(run_name, "lock"), b"hostA:1 (killed)", px=800)
    await client.aclose()
    with pytest.raises(RunLocked, match=r"hostA:1 \(killed\)"):
        async with registry.lock("hostB:2", wait_s=0.2):
            pass
    async with registry.lock("hostB:2", wait_s=5):
        pass


async def test_a_lost_lock_is_told(registry: Registry, redis_url: str, run_name: str) -> None:
    """A trainer that was suspended for longer than its lock lives must learn that another has the run."""
    client = open_client(redis_url)
    async with registry.lock("hostA:1", ttl_s=0.6) as lost:
        await client.set(key(run_name, "lock"), b"hostB:2")
        await asyncio.wait_for(lost.wait(), 3)
    assert await client.get(key(run_name, "lock")) == b"hostB:2", "and it must not end the other's lock"
    await client.aclose()


async def test_who_lost_the_lock_publishes_no_more(registry: Registry, redis_url: str, run_name: str) -> None:
    """Woken after a suspension it may come to its publish before it comes to renewing its lock."""
    client, other = open_client(redis_url), Registry(open_client(redis_url), run_name)
    async with registry.lock("hostA:1", ttl_s=60):
        await registry.set_manifest(b"mine")
        await client.delete(key(run_name, "lock"))
        await registry.set_manifest(b"nobody else has it")
        async with other.lock("hostB:2"):
            await other.set_manifest(b"other")
            with pytest.raises(RunLocked, match=r"taken over by hostB:2"):
                await registry.set_manifest(b"late")
    assert await other.get_manifest() == b"other"
    await client.aclose()


async def test_a_forgotten_lock_is_taken_again(registry: Registry, redis_url: str, run_name: str) -> None:
    """A Redis that restarted without its data."""
    client = open_client(redis_url)
    async with registry.lock("hostA:1", ttl_s=3) as lost:
        await client.delete(key(run_name, "lock"))
        async with asyncio.timeout(10):
            while not (await client.get(key(run_name, "lock")) or b"").startswith(b"hostA:1"):
                await asyncio.sleep(0.05)
        assert not lost.is_set()
    await client.aclose()


async def test_a_silent_redis_costs_no_lock(redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped for longer than the lock lives: nobody can have taken it meanwhile, so the trainer goes on."""
    monkeypatch.setattr(connection, "COMMAND_TIMEOUT_S", 0.3)
    client = open_client(redis_url)
    server = int((await client.info("server"))["process_id"])
    async with Registry(client, run_name).lock("hostA:1", ttl_s=0.6) as lost:
        os.kill(server, signal.SIGSTOP)
        try:
            await asyncio.sleep(3)
        finally:
            os.kill(server, signal.SIGCONT)
        await asyncio.sleep(1)
        assert not lost.is_set()
        assert (await client.get(key(run_name, "lock")) or b"").startswith(b"hostA:1")
    await client.aclose()


async def test_a_start_waits_for_a_dead_trainers_lock_and_is_refused_by_a_living_one(
    registry: Registry, redis_url: str, run_name: str
) -> None:
    client = open_client(redis_url)
    await client.set(key(run_name, "lock"), b"hostA:1 (killed)", px=800)
    await registry.require_no_trainer(5)
    async with registry.lock("hostA:1"):
        with pytest.raises(RunLocked, match=r"has a trainer already: hostA:1 .*choose another run\.name"):
            await registry.require_no_trainer(0.2)
    await client.aclose()
