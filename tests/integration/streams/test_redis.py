"""The Stream port on a real Redis: leases, forwarding, dead letters, and bounded memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from trireme.streams import RedisStreams, Stream

LEASE_S = 1.5


@pytest_asyncio.fixture
async def one(redis_url: str, run_name: str) -> AsyncIterator[RedisStreams]:
    async with RedisStreams(redis_url, run_name, lease_s=LEASE_S) as streams:
        yield streams


@pytest_asyncio.fixture
async def other(redis_url: str, run_name: str) -> AsyncIterator[RedisStreams]:
    """A second consumer of the same run."""
    async with RedisStreams(redis_url, run_name, lease_s=LEASE_S) as streams:
        yield streams


async def texts(stream: Stream, count: int = 100) -> list[str]:
    """Take and finish what there is."""
    entries = await stream.take(count, block_s=0)
    await stream.done([entry.id for entry in entries])
    return [entry.data.decode() for entry in entries]


async def test_entries_come_in_order_with_their_bytes(one: RedisStreams) -> None:
    data = [bytes([0, 255, number]) for number in range(5)]
    ids = [await one.prompts.put(item) for item in data]
    entries = await one.prompts.take(3, block_s=0) + await one.prompts.take(3, block_s=0)
    assert [(entry.id, entry.data, entry.deliveries) for entry in entries] == [
        (entry_id, item, 1) for entry_id, item in zip(ids, data, strict=True)
    ]


async def test_entries_put_before_anyone_listens_are_kept(redis_url: str, run_name: str) -> None:
    unconnected = RedisStreams(redis_url, run_name)
    await unconnected.prompts.put(b"early")
    await unconnected.link.close()
    async with RedisStreams(redis_url, run_name) as streams:
        assert await texts(streams.prompts) == ["early"]


async def test_take_waits_for_an_entry_and_no_longer(one: RedisStreams, other: RedisStreams) -> None:
    started = time.monotonic()
    assert await one.prompts.take(1, block_s=0.4) == []
    assert 0.35 < time.monotonic() - started < 2
    waiting = asyncio.create_task(one.prompts.take(1, block_s=10))
    await asyncio.sleep(0.1)
    await other.prompts.put(b"late")
    assert [entry.data for entry in await asyncio.wait_for(waiting, 2)] == [b"late"]


async def test_two_consumers_share_without_overlap(one: RedisStreams, other: RedisStreams) -> None:
    for number in range(40):
        await one.prompts.put(str(number).encode())
    shares = [await (one, other)[turn % 2].prompts.take(5, block_s=0) for turn in range(8)]
    taken = [entry.data for share in shares for entry in share]
    assert sorted(taken, key=int) == [str(number).encode() for number in range(40)]
    assert await one.prompts.pending() == 40


async def test_a_lease_that_ran_out_goes_to_another(one: RedisStreams, other: RedisStreams) -> None:
    """Q-08: min-idle below the time the work takes. Both have it; what comes downstream is one."""
    await one.prompts.put(b"work")
    (slow,) = await one.prompts.take(1, block_s=0)
    assert await other.prompts.take(1, block_s=0.1) == []
    (second,) = await other.prompts.take(1, block_s=5)
    assert (second.id, second.data, second.deliveries) == (slow.id, b"work", 2)
    assert await one.prompts.renew([slow.id]) == []
    assert await other.prompts.forward(second, other.samples, [b"result"])
    assert not await one.prompts.forward(slow, one.samples, [b"result"])
    assert await texts(one.samples) == ["result"]
    assert await one.prompts.depth() == 0


async def test_the_slow_one_may_forward_first(one: RedisStreams, other: RedisStreams) -> None:
    """Q-08, the other way round: the claimant finds the entry gone."""
    await one.prompts.put(b"work")
    (slow,) = await one.prompts.take(1, block_s=0)
    (second,) = await other.prompts.take(1, block_s=5)
    assert await one.prompts.forward(slow, one.samples, [b"result"])
    assert not await other.prompts.forward(second, other.samples, [b"result"])
    assert await texts(one.samples) == ["result"]


async def test_renewed_leases_stay(one: RedisStreams, other: RedisStreams) -> None:
    await one.prompts.put(b"work")
    (entry,) = await one.prompts.take(1, block_s=0)
    for _ in range(5):
        await asyncio.sleep(LEASE_S / 2)
        assert await one.prompts.renew([entry.id]) == [entry.id]
        assert await other.prompts.take(1, block_s=0) == []
    (later,) = await other.prompts.take(1, block_s=5)
    assert later.deliveries == 2, "renewing must not count as a delivery"


async def test_released_entries_are_free_at_once(one: RedisStreams, other: RedisStreams) -> None:
    await one.prompts.put(b"work")
    (entry,) = await one.prompts.take(1, block_s=0)
    await one.prompts.release([entry.id])
    assert [taken.data for taken in await other.prompts.take(1, block_s=0)] == [b"work"]
    await one.prompts.release([entry.id])  # no longer ours to give
    assert await one.prompts.take(1, block_s=0) == []


async def test_forwarding_again_adds_nothing(one: RedisStreams) -> None:
    """As after a lost answer: repeated, it must neither double nor fail."""
    await one.prompts.put(b"p")
    (entry,) = await one.prompts.take(1, block_s=0)
    assert [await one.prompts.forward(entry, one.samples, [b"a", b"b"]) for _ in range(3)] == [True, False, False]
    assert await texts(one.samples) == ["a", "b"]


async def test_forwarding_elsewhere_is_refused(one: RedisStreams, other: RedisStreams) -> None:
    await one.prompts.put(b"p")
    (entry,) = await one.prompts.take(1, block_s=0)
    with pytest.raises(TypeError, match="not a stream of this Redis"):
        await one.prompts.forward(entry, other.samples, [b"a"])
    assert await one.prompts.pending() == 1


async def test_poison_goes_to_the_dead_letters(one: RedisStreams, other: RedisStreams) -> None:
    """Three deliveries, none finished: out of the way, with what it was and why."""
    await one.samples.put(b"poison")
    await one.samples.put(b"fine")
    for delivery in (1, 2, 3):
        (entry, *_) = await one.samples.take(1, block_s=5)
        assert (entry.data, entry.deliveries) == (b"poison", delivery)
        await one.samples.release([entry.id])
    assert await texts(other.samples) == ["fine"]
    (letter,) = await one.dead.read()
    assert (letter.data, letter.source, letter.deliveries) == (b"poison", "samples", 3)
    assert letter.reason == "delivered 3 times and never finished"
    assert await one.samples.depth() == 0


async def test_dead_letters_by_hand_are_read_in_order(one: RedisStreams) -> None:
    for number in range(3):
        await one.prompts.put(str(number).encode())
    for entry in await one.prompts.take(3, block_s=0):
        await one.prompts.dead_letter(entry, f"no {entry.data.decode()}")
        await one.prompts.dead_letter(entry, "again")  # gone: ignored
    first, *rest = await one.dead.read()
    assert [letter.reason for letter in (first, *rest)] == ["no 0", "no 1", "no 2"]
    assert await one.dead.read(after=first.id) == rest
    assert (await one.dead.depth(), await one.prompts.depth()) == (3, 0)


async def test_done_is_harmless_when_repeated_or_empty(one: RedisStreams) -> None:
    entry_id = await one.prompts.put(b"x")
    await one.prompts.take(1, block_s=0)
    for ids in ([entry_id], [entry_id], []):
        await one.prompts.done(ids)
    assert (await one.prompts.depth(), await one.prompts.pending()) == (0, 0)


async def test_entries_deleted_under_a_lease_do_not_come_back(one: RedisStreams, other: RedisStreams) -> None:
    """Redis 6.2 answers nil for them when they are claimed, 7.0 nothing; either way they leave the books."""
    await one.prompts.put(b"gone")
    await one.prompts.put(b"stays")
    gone, _ = await one.prompts.take(2, block_s=0)
    await one.client.xdel(one.prompts.key, gone.id)
    assert [entry.data for entry in await other.prompts.take(2, block_s=5)] == [b"stays"]
    assert await one.prompts.pending() == 1


async def test_clearing_takes_leased_entries_too(one: RedisStreams, other: RedisStreams) -> None:
    """A run that starts over must not get results of its earlier life."""
    async with one.client.pipeline(transaction=False) as pipe:
        for number in range(1500):
            pipe.xadd(one.prompts.key, {"d": str(number).encode()})
        await pipe.execute()
    leased, *_ = await other.prompts.take(1100, block_s=0)
    assert await one.prompts.clear() == 1500
    assert not await other.prompts.forward(leased, other.samples, [b"late"])
    assert (await one.prompts.depth(), await one.prompts.pending(), await one.samples.depth()) == (0, 0, 0)
    await one.prompts.put(b"new")
    assert await texts(other.prompts) == ["new"]


async def test_what_a_dashboard_asks(one: RedisStreams) -> None:
    assert (await one.prompts.depth(), await one.prompts.pending(), await one.prompts.oldest_age_s()) == (0, 0, None)
    await one.prompts.put(b"a")
    await asyncio.sleep(0.2)
    await one.prompts.put(b"b")
    await one.prompts.take(1, block_s=0)
    age = await one.prompts.oldest_age_s()
    assert (await one.prompts.depth(), await one.prompts.pending()) == (2, 1)
    assert age is not None and 0.2 <= age < 5


async def test_memory_is_bounded(one: RedisStreams) -> None:
    """Q-05, Q-07: 10,000 entries of 1 KiB through a stream leave it empty and its memory as before."""

    async def round_trip(entries: int) -> None:
        for _ in range(entries // 100):
            async with one.client.pipeline(transaction=False) as pipe:
                for _ in range(100):
                    pipe.xadd(one.prompts.key, {"d": b"x" * 1024})
                await pipe.execute()
            await one.prompts.done([entry.id for entry in await one.prompts.take(100, block_s=0)])

    await round_trip(100)
    before = await one.client.memory_usage(one.prompts.key)
    await round_trip(10_000)
    after = await one.client.memory_usage(one.prompts.key)
    assert await one.prompts.depth() == 0
    assert before is not None and after is not None and after <= before + 16 * 1024


async def test_dead_letters_are_bounded(one: RedisStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q-07: exactly, not about."""
    monkeypatch.setattr("trireme.streams.redis.MOST_DEAD_LETTERS", 20)
    for number in range(50):
        await one.prompts.put(str(number).encode())
    for entry in await one.prompts.take(50, block_s=0):
        await one.prompts.dead_letter(entry, "no")
    assert [letter.data for letter in await one.dead.read()] == [str(number).encode() for number in range(30, 50)]


async def test_runs_are_apart(one: RedisStreams, redis_url: str) -> None:
    async with RedisStreams(redis_url, "another") as another:
        await one.prompts.put(b"mine")
        assert await texts(another.prompts) == []


async def test_consumers_leave_no_trace(redis_url: str, run_name: str) -> None:
    """Each life of a process has a name of its own; a run of months must not collect them."""
    async with RedisStreams(redis_url, run_name, lease_s=LEASE_S) as holder:
        await holder.prompts.put(b"held")
        await holder.prompts.take(1, block_s=0)
        async with RedisStreams(redis_url, run_name, lease_s=LEASE_S) as idle:
            await idle.prompts.put(b"finished")
            assert await texts(idle.prompts) == ["finished"]
            assert len(await holder.client.xinfo_consumers(holder.prompts.key, "rollout")) == 2
        assert len(await holder.client.xinfo_consumers(holder.prompts.key, "rollout")) == 1
    async with RedisStreams(redis_url, run_name, lease_s=LEASE_S) as later:  # who left while holding is remembered
        assert [entry.data for entry in await later.prompts.take(1, block_s=5)] == [b"held"]


@pytest.mark.parametrize("run", ["", "a{b", "a}b"])
async def test_run_names_that_break_keys_are_refused(redis_url: str, run: str) -> None:
    with pytest.raises(ValueError, match="must not be empty or hold braces"):
        RedisStreams(redis_url, run)


async def test_impossible_settings_are_refused(redis_url: str) -> None:
    with pytest.raises(ValueError, match="lease_s 0 must be positive"):
        RedisStreams(redis_url, "r", lease_s=0)


async def test_an_entry_that_is_none_of_ours_goes_to_the_dead_letters(one: RedisStreams) -> None:
    """Somebody's XADD by hand must not end the consumer."""
    await one.client.xadd(one.prompts.key, {"x": "y"})
    await one.prompts.put(b"ours")
    assert await texts(one.prompts) == ["ours"]
    assert [letter.reason for letter in await one.dead.read()] == ["no field d: nobody of this run put it there"]
    assert await one.prompts.depth() == 0
