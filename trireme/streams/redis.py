"""Streams in Redis 6.2 and later: one Redis stream and one consumer group per hop, and one stream of dead letters.

Entries that are done are deleted, not only acknowledged (acknowledging frees nothing), so memory holds what is waiting
or leased. What must happen in one piece is a Lua script (`scripts`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from redis import exceptions
from redis.asyncio import Redis

from trireme.streams import scripts
from trireme.streams.base import DeadLetter, Entry, Stream
from trireme.streams.connection import PATIENCE_S, Link, open_client
from trireme.streams.errors import StreamsError

T = TypeVar("T")
log = logging.getLogger(__name__)

# A blocking read sees no lease of others run out, so it is cut into slices; short against any lease.
LONGEST_SLICE_S = 5.0
# Idle time given to an entry that is released: longer than any lease.
RELEASED_MS = 7 * 24 * 3600 * 1000
# A consumer this silent without a lease is one that died.
FORGET_AFTER_MS = 3600 * 1000
# How long leaving the groups may take.
FAREWELL_S = 2.0
# Dead letters kept; the oldest go first. They are for people to look at, not a queue.
MOST_DEAD_LETTERS = 10_000


@dataclass(frozen=True)
class _Settings:
    consumer: str
    lease_s: float
    max_deliveries: int


class RedisStreams:
    """The streams of one run: `prompts`, `samples`, `scored`, `dead`. An async context; or `connect` and `close`.

    `consumer` must differ between processes and between lives of one. `url` is as redis-py takes it.
    Raises ValueError on an impossible setting, StreamsError on a URL that is none.
    """

    def __init__(
        self,
        url: str,
        run: str,
        *,
        consumer: str | None = None,
        lease_s: float = 120.0,
        max_deliveries: int = 3,
        connect_timeout_s: float = 10.0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        if lease_s <= 0 or max_deliveries < 1:
            raise ValueError(f"lease_s {lease_s} must be positive and max_deliveries {max_deliveries} at least 1")
        self._connect_timeout_s = connect_timeout_s
        self.link = Link(open_client(url, connect_timeout_s), patience_s)
        settings = _Settings(consumer or new_consumer_name(), lease_s, max_deliveries)
        self.dead = RedisDeadLetters(self.link, key(run, "dead"))
        self.prompts, self.samples, self.scored = (
            RedisStream(self.link, key(run, name), name, group, self.dead.key, settings)
            for name, group in (("prompts", "rollout"), ("samples", "reward"), ("scored", "trainer"))
        )

    @property
    def client(self) -> Redis:
        """For what else lives in the same Redis."""
        return self.link.client

    @property
    def streams(self) -> tuple[RedisStream, RedisStream, RedisStream]:
        """In the order of the flow."""
        return self.prompts, self.samples, self.scored

    async def connect(self) -> Self:
        """Raises StreamsError when no Redis that serves answers within `connect_timeout_s`; then makes the groups."""
        await self.link.check(self._connect_timeout_s)
        for stream in self.streams:
            await stream.create_group()
        return self

    async def close(self) -> None:
        """Leave the groups, as far as nothing is leased, and disconnect."""
        with suppress(StreamsError, TimeoutError):  # the server may be gone by now, and nothing depends on the farewell
            async with asyncio.timeout(FAREWELL_S):
                for stream in self.streams:
                    await stream.forget_consumers()
        await self.link.close()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class RedisStream:
    """One hop; see `trireme.streams.base.Stream`."""

    def __init__(self, link: Link, key: str, name: str, group: str, dead_key: str, settings: _Settings) -> None:
        self.name = name
        self.key = key
        self.lease_s = settings.lease_s
        self._link, self._group, self._dead_key, self._settings = link, group, dead_key, settings
        self._consumer = settings.consumer
        self._redis: Any = link.client  # redis-py's types are unions over all its modes
        self._lease_ms = max(1, round(settings.lease_s * 1000))
        register = link.client.register_script
        self._claim, self._set_idle = register(scripts.CLAIM), register(scripts.SET_IDLE)
        self._done, self._clear = register(scripts.DONE), register(scripts.CLEAR)
        self._forget = register(scripts.FORGET)
        self._forward, self._bury = register(scripts.FORWARD), register(scripts.DEAD_LETTER)

    async def create_group(self) -> None:
        """Make stream and group, reading from the first entry; fine when they exist."""

        async def create() -> None:
            try:
                await self._redis.xgroup_create(self.key, self._group, id="0", mkstream=True)
            except exceptions.ResponseError as error:
                if "BUSYGROUP" not in str(error):  # that it exists
                    raise

        await self._link.call(create)

    async def put(self, data: bytes) -> str:
        return (await self._link.call(lambda: self._redis.xadd(self.key, {"d": data}))).decode()

    async def take(self, count: int, block_s: float) -> list[Entry]:
        deadline = time.monotonic() + block_s
        while True:
            entries = await self._claim_expired(count)
            if len(entries) < count:
                wait_s = 0.0 if entries else min(deadline - time.monotonic(), LONGEST_SLICE_S, self.lease_s / 4)
                entries += await self._read_new(count - len(entries), wait_s)
            if entries or time.monotonic() >= deadline:
                return entries

    async def renew(self, entry_ids: Sequence[str]) -> list[str]:
        return await self._idle(entry_ids, 0)

    async def release(self, entry_ids: Sequence[str]) -> None:
        await self._idle(entry_ids, RELEASED_MS)

    async def done(self, entry_ids: Sequence[str]) -> None:
        if entry_ids:
            await self._script(self._done, [self.key], [self._group, *entry_ids])

    async def forward(self, entry: Entry, to: Stream, outputs: Sequence[bytes]) -> bool:
        if not isinstance(to, RedisStream) or to._link is not self._link:
            raise TypeError(f"cannot forward from {self.name} to {to.name} at once: it is not a stream of this Redis")
        return bool(await self._script(self._forward, [self.key, to.key], [self._group, entry.id, *outputs]))

    async def dead_letter(self, entry: Entry, reason: str) -> None:
        facts = [self._group, entry.id, entry.data, reason, self.name, entry.deliveries, MOST_DEAD_LETTERS]
        await self._script(self._bury, [self.key, self._dead_key], facts)

    async def clear(self) -> int:
        return int(await self._script(self._clear, [self.key], [self._group]))

    async def depth(self) -> int:
        return int(await self._link.call(lambda: self._redis.xlen(self.key)))

    async def oldest_age_s(self) -> float | None:
        first = await self._link.call(lambda: self._redis.xrange(self.key, count=1))
        if not first:
            return None
        seconds, microseconds = await self._link.call(self._redis.time)
        return max(0.0, seconds + microseconds / 1e6 - int(first[0][0].partition(b"-")[0]) / 1e3)

    async def pending(self) -> int:
        return int((await self._call(lambda: self._redis.xpending(self.key, self._group)))["pending"])

    async def forget_consumers(self) -> None:
        """Leave the group when nothing is leased here, and remove consumers that died without a lease."""
        await self._script(self._forget, [self.key], [self._group, self._consumer, FORGET_AFTER_MS], patience_s=0.0)

    async def _claim_expired(self, count: int) -> list[Entry]:
        limits = [self._lease_ms, count, self._settings.max_deliveries, MOST_DEAD_LETTERS, self.name]
        rows = await self._script(self._claim, [self.key, self._dead_key], [self._group, self._consumer, *limits])
        if rows:
            log.info("claimed entries whose lease ran out", extra={"stream": self.name, "entries": len(rows)})
        return [Entry(entry_id.decode(), data, deliveries) for entry_id, data, deliveries in rows]

    async def _read_new(self, count: int, wait_s: float) -> list[Entry]:
        block_ms = round(wait_s * 1000)

        def read() -> Awaitable[Any]:
            block = block_ms if block_ms > 0 else None  # 0 would mean: for ever
            return self._redis.xreadgroup(self._group, self._consumer, {self.key: ">"}, count=count, block=block)

        taken = []
        for _, rows in await self._call(read) or []:
            for entry_id, fields in rows:
                entry = Entry(entry_id.decode(), fields.get(b"d", b""), 1)
                if b"d" in fields:
                    taken.append(entry)
                else:
                    await self.dead_letter(entry, "no field d: nobody of this run put it there")
        return taken

    async def _idle(self, entry_ids: Sequence[str], idle_ms: int) -> list[str]:
        if not entry_ids:
            return []
        held = await self._script(self._set_idle, [self.key], [self._group, self._consumer, idle_ms, *entry_ids])
        return [entry_id.decode() for entry_id in held]

    async def _script(self, script: Any, keys: list[str], args: list[Any], patience_s: float | None = None) -> Any:
        return await self._call(lambda: script(keys=keys, args=args), patience_s)

    async def _call(self, command: Callable[[], Awaitable[T]], patience_s: float | None = None) -> T:
        """A command that needs the group. It is missing after a restart of a Redis that saves nothing."""
        try:
            return await self._link.call(command, patience_s)
        except StreamsError as error:
            if "NOGROUP" not in str(error) and "no such key" not in str(error):
                raise
            log.warning("stream is new or its server lost it; making it", extra={"stream": self.name})
            await self.create_group()
            return await self._link.call(command, patience_s)


class RedisDeadLetters:
    """Entries that were given up, oldest first. The latest `MOST_DEAD_LETTERS` are kept."""

    def __init__(self, link: Link, key: str) -> None:
        self.key = key
        self._link = link
        self._redis: Any = link.client

    async def read(self, after: str = "0-0", count: int = 100) -> list[DeadLetter]:
        """Up to `count` dead letters that came after the one with id `after`."""
        rows = await self._link.call(lambda: self._redis.xrange(self.key, min=f"({after}", count=count))
        return [_dead_letter(entry_id.decode(), fields) for entry_id, fields in rows]

    async def newest(self) -> str:
        """The id of the last letter, "0-0" when there is none: where to read on to hear of later ones only."""
        rows = await self._link.call(lambda: self._redis.xrevrange(self.key, count=1))
        return str(rows[0][0].decode()) if rows else "0-0"

    async def depth(self) -> int:
        return int(await self._link.call(lambda: self._redis.xlen(self.key)))


def _dead_letter(entry_id: str, fields: dict[bytes, bytes]) -> DeadLetter:
    text = {name: fields[name.encode()].decode() for name in ("reason", "source", "n")}
    return DeadLetter(entry_id, fields[b"d"], text["reason"], text["source"], int(text["n"]))


def key(run: str, name: str) -> str:
    """The Redis key of something of a run. The braces keep a run on one node of a cluster."""
    if not run or set(run) & set("{}"):
        raise ValueError(f"run name {run!r} must not be empty or hold braces")
    return f"trireme:{{{run}}}:{name}"


def new_consumer_name() -> str:
    """Readable, and different for every life of a process."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
