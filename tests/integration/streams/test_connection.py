"""What a user reads when Redis is away, is not Redis, is too old, or refuses; and that a restart is survived."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from trireme.config.secrets import mask_url
from trireme.streams import AccessDenied, RedisStreams, StreamsError, Unreachable, WritesRefused, WrongServer
from trireme.streams.connection import Link, open_client
from trireme.streams.embedded import EmbeddedRedis


@asynccontextmanager
async def answering(answer: Callable[[bytes], bytes]) -> AsyncIterator[str]:
    """A server that answers everything with `answer`; its host:port."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.read(65536):
            writer.write(answer(request))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def refusal(url: str, timeout_s: float = 1.0) -> StreamsError:
    streams = RedisStreams(url, "r", connect_timeout_s=timeout_s)
    with pytest.raises(StreamsError) as caught:
        await streams.connect()
    await streams.close()
    return caught.value


async def test_nobody_there(free_port: int) -> None:
    started = time.monotonic()
    error = await refusal(f"redis://:secret@127.0.0.1:{free_port}/0")
    assert isinstance(error, Unreachable)
    assert f"Redis at 127.0.0.1:{free_port} did not answer for 1 s; is it running?" in str(error)
    assert "secret" not in str(error)
    assert time.monotonic() - started < 5


async def test_a_server_that_says_nothing() -> None:
    """A port that accepts and is silent must not hold us longer than the time given."""
    started = time.monotonic()
    async with answering(lambda _: b"") as address:
        error = await refusal(f"redis://{address}")
    assert isinstance(error, Unreachable)
    assert f"what is at {address} said nothing for 1 s" in str(error)
    assert time.monotonic() - started < 5


async def test_a_web_server() -> None:
    async with answering(lambda _: b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as address:
        error = await refusal(f"redis://{address}")
    assert isinstance(error, WrongServer)
    assert f"what answers at {address} does not speak Redis's protocol" in str(error)


async def test_an_old_redis() -> None:
    info = b"# Server\r\nredis_version:5.0.14\r\n"

    def old(request: bytes) -> bytes:
        replies = [
            b"$%d\r\n%s\r\n" % (len(info), info) if part == b"INFO" else b"+OK\r\n" for part in commands(request)
        ]
        return b"".join(replies)

    async with answering(old) as address:
        error = await refusal(f"redis://{address}")
    assert isinstance(error, WrongServer)
    assert "is version 5.0.14: 6.2 or later is needed" in str(error)


def commands(request: bytes) -> list[bytes]:
    """The names of pipelined commands: after each array header, the first bulk string."""
    lines = request.split(b"\r\n")
    return [lines[at + 2] for at, line in enumerate(lines) if line.startswith(b"*")]


@pytest.mark.parametrize("user", ["", ":wrong@"])
async def test_wrong_or_missing_password(redis_url: str, user: str) -> None:
    started = time.monotonic()
    error = await refusal(f"redis://{user}{redis_url.rpartition('@')[2]}", timeout_s=20)
    assert isinstance(error, AccessDenied)
    assert "check user and password in redis.url" in str(error)
    assert time.monotonic() - started < 3, "trying again cannot help"


async def test_a_url_that_is_none() -> None:
    with pytest.raises(StreamsError, match=r"redis.url 'http://u:\*\*\*@x:1' is not a Redis URL"):
        RedisStreams("http://u:secret@x:1", "r")


@pytest.mark.parametrize(
    ("url", "shown"),
    [("redis://:p@h:1/0", "redis://:***@h:1/0"), ("rediss://u:p@x@h", "rediss://u:***@h"), ("redis://h", "redis://h")],
)
def test_urls_are_shown_without_password(url: str, shown: str) -> None:
    assert mask_url(url) == shown


async def test_full_memory_refuses_and_loses_nothing(redis_binary: Path, tmp_path: Path) -> None:
    """Nothing half-forwarded, and what drains the server still works."""
    with EmbeddedRedis.start(tmp_path, binary=redis_binary) as server:
        async with RedisStreams(server.url, "r", lease_s=0.2, max_deliveries=1) as streams:
            for number in range(3):
                await streams.prompts.put(str(number).encode())
            first, second, _ = await streams.prompts.take(3, block_s=0)
            await streams.client.config_set("maxmemory", "1")
            await asyncio.sleep(0.3)
            for attempt in (
                streams.prompts.put(b"x"),
                streams.prompts.forward(first, streams.samples, [b"y", b"z"]),
                streams.prompts.dead_letter(first, "no"),
            ):
                with pytest.raises(WritesRefused, match="its memory is full; raise maxmemory"):
                    await attempt
            assert await streams.prompts.take(3, block_s=0) == [], "too often delivered, and no room for dead letters"
            await streams.prompts.done([second.id])
            assert (await streams.prompts.depth(), await streams.samples.depth()) == (2, 0)
            await streams.client.config_set("maxmemory", "0")
            assert await streams.prompts.forward(first, streams.samples, [b"y", b"z"])
            await streams.prompts.take(3, block_s=0)
            assert (await streams.samples.depth(), await streams.dead.depth()) == (2, 1)


async def test_full_disk_refuses_and_loses_nothing(redis_binary: Path, tmp_path: Path) -> None:
    """A server that cannot save refuses writes (MISCONF): here its snapshots have nowhere to go."""
    with EmbeddedRedis.start(tmp_path, binary=redis_binary) as server:
        async with RedisStreams(server.url, "r") as streams:
            await streams.prompts.put(b"p")
            (entry,) = await streams.prompts.take(1, block_s=0)
            await fail_to_save(streams, tmp_path / "dump.rdb")
            for attempt in (streams.prompts.put(b"x"), streams.prompts.forward(entry, streams.samples, [b"y"])):
                with pytest.raises(WritesRefused, match="cannot save them; is its disk full"):
                    await attempt
            await streams.client.config_set("stop-writes-on-bgsave-error", "no")
            assert (await streams.prompts.depth(), await streams.samples.depth()) == (1, 0)
            assert await streams.prompts.forward(entry, streams.samples, [b"y"])
            await streams.client.config_set("save", "")  # or it would not end: it wants a snapshot then


async def fail_to_save(streams: RedisStreams, dump: Path) -> None:
    """Make the last snapshot a failed one, in a folder's place."""
    dump.mkdir()
    (dump / "x").touch()
    await streams.client.config_set("save", "3600 1")
    await streams.client.bgsave()
    while (await streams.client.info("persistence"))["rdb_last_bgsave_status"] == "ok":
        await asyncio.sleep(0.05)


class Restarting:
    """A server that can be killed and come back on its port, as one under a supervisor does."""

    def __init__(self, directory: Path, binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.start = lambda: EmbeddedRedis.start(directory, binary=binary)
        self.server = self.start()
        port = int(self.server.url.rpartition(":")[2].partition("/")[0])
        password = self.server.url.partition("//:")[2].partition("@")[0]
        monkeypatch.setattr("trireme.streams.embedded._free_port", lambda: port)
        monkeypatch.setattr("trireme.streams.embedded.secrets.token_urlsafe", lambda _: password)

    def kill(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()

    def revive(self) -> None:
        self.server = self.start()


async def test_a_restart_is_survived(redis_binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting consumer and a producer go on when the server is back, and leases and entries are still there."""
    redis = Restarting(tmp_path, redis_binary, monkeypatch)
    async with RedisStreams(redis.server.url, "r", patience_s=30) as streams:
        await streams.prompts.put(b"before")
        (entry,) = await streams.prompts.take(1, block_s=0)
        waiting = asyncio.create_task(streams.prompts.take(1, block_s=20))
        await asyncio.sleep(1.2)  # into the wait, and past the second between syncs of the server's file
        redis.kill()
        putting = asyncio.create_task(streams.prompts.put(b"during"))
        await asyncio.sleep(0.5)
        assert not putting.done()
        await asyncio.to_thread(redis.revive)
        await asyncio.wait_for(putting, 10)
        assert [taken.data for taken in await asyncio.wait_for(waiting, 10)] == [b"during"]
        assert await streams.prompts.forward(entry, streams.samples, [b"after"])
        assert await streams.samples.depth() == 1
    redis.server.stop()


async def test_patience_ends(redis_binary: Path, tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path, binary=redis_binary) as server:
        streams = await RedisStreams(server.url, "r", patience_s=0.5).connect()
        server.stop()
        started = time.monotonic()
        with pytest.raises(Unreachable, match=r"did not answer for 0\.5 s"):
            await streams.prompts.put(b"x")
        assert time.monotonic() - started < 5
        await streams.close()


async def test_a_server_that_forgot_everything(redis_url: str, run_name: str) -> None:
    """A Redis without persistence that restarts: streams and groups are made anew, and work goes on."""
    async with RedisStreams(redis_url, run_name) as streams:
        await streams.prompts.put(b"lost")
        (entry,) = await streams.prompts.take(1, block_s=0)
        await streams.client.delete(streams.prompts.key, streams.samples.key)
        assert not await streams.prompts.forward(entry, streams.samples, [b"of something gone"])
        assert await streams.prompts.renew([entry.id]) == []
        await streams.client.delete(streams.prompts.key)
        assert await streams.prompts.take(1, block_s=0) == []
        await streams.prompts.put(b"new")
        assert [taken.data for taken in await streams.prompts.take(1, block_s=0)] == [b"new"]


async def test_a_cancellation_that_the_client_swallows_still_ends_the_task(redis_url: str) -> None:
    """Before Python 3.12, asyncio.wait_for inside redis-py loses one when a send ends at the same moment."""
    link = Link(open_client(redis_url))

    async def swallows() -> int:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return 1

    task = asyncio.create_task(link.call(swallows))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(task), 10)
    await link.close()
