"""Holding entries: leases last as long as the work, and no slot leaks when it fails."""

from __future__ import annotations

import asyncio

import pytest

from trireme.streams import RedisStreams
from trireme.streams.lease import held


async def test_work_longer_than_the_lease_keeps_it(redis_url: str, run_name: str) -> None:
    async with (
        RedisStreams(redis_url, run_name, lease_s=2.0) as one,
        RedisStreams(redis_url, run_name, lease_s=2.0) as other,
    ):
        await one.prompts.put(b"long")
        entries = await one.prompts.take(1, block_s=0)
        async with held(one.prompts, entries) as lost:
            assert await other.prompts.take(1, block_s=3.0) == []
            assert lost == set()


async def test_failed_work_frees_its_entry(redis_url: str, run_name: str) -> None:
    """Q-11: an exception on the way gives the slot back at once, not when a long lease ends."""
    async with RedisStreams(redis_url, run_name, lease_s=60) as one, RedisStreams(redis_url, run_name) as other:
        await one.prompts.put(b"fails")
        entries = await one.prompts.take(1, block_s=0)
        with pytest.raises(KeyError):
            async with held(one.prompts, entries):
                raise KeyError("verifier")
        assert [entry.deliveries for entry in await other.prompts.take(1, block_s=0)] == [2]


async def test_cancelled_work_frees_its_entry(redis_url: str, run_name: str) -> None:
    """Q-11, when a service is told to stop."""
    async with RedisStreams(redis_url, run_name, lease_s=60) as one:
        await one.prompts.put(b"stopped")
        entries = await one.prompts.take(1, block_s=0)

        async def work() -> None:
            async with held(one.prompts, entries):
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [entry.data for entry in await one.prompts.take(1, block_s=0)] == [b"stopped"]


async def test_a_lost_lease_is_told(redis_url: str, run_name: str) -> None:
    async with RedisStreams(redis_url, run_name, lease_s=1.0) as one:
        await one.prompts.put(b"x")
        entries = await one.prompts.take(1, block_s=0)
        async with held(one.prompts, entries) as lost:
            await one.prompts.done([entries[0].id])  # as when another finished it
            async with asyncio.timeout(10):
                while not lost:
                    await asyncio.sleep(0.05)
            assert lost == {entries[0].id}
