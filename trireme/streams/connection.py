"""One Redis client that survives a restart of its server, and errors that say what to do about them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential

from trireme.config.secrets import mask_url
from trireme.streams.errors import AccessDenied, StreamsError, Unreachable, WritesRefused, WrongServer

T = TypeVar("T")

# XPENDING with IDLE, which finds entries whose lease ran out, came with 6.2.
OLDEST_VERSION = (6, 2)
# How long one command may take. Blocking reads are cut into slices shorter than this.
COMMAND_TIMEOUT_S = 15.0
# How long a lost connection is tried again before whoever needs it hears of it: a restart with some GiB to load.
PATIENCE_S = 60.0

_LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError, asyncio.TimeoutError)
# redis-py counts the first two among lost connections.
_DENIED = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)


def open_client(url: str, connect_timeout_s: float = 10.0) -> Redis:
    """A client for `url`, not yet connected. Raises StreamsError when the URL is not one."""
    try:
        return Redis.from_url(
            url,
            protocol=2,
            socket_connect_timeout=connect_timeout_s,
            socket_timeout=COMMAND_TIMEOUT_S,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),  # `Link` decides what is repeated, and for how long
        )
    except ValueError as error:
        raise StreamsError(f"redis.url {mask_url(url)!r} is not a Redis URL: {error}") from error


class Link:
    """Sends commands over a client: reconnects for `patience_s` seconds, and raises StreamsError, never redis-py's."""

    def __init__(self, client: Redis, patience_s: float = PATIENCE_S) -> None:
        self.client = client
        self.address = _address(client)
        self._patience_s = patience_s

    async def call(self, command: Callable[[], Awaitable[T]], patience_s: float | None = None) -> T:
        """What `command` returns. It is repeated after a lost connection, so it must be safe to repeat."""
        patience = self._patience_s if patience_s is None else patience_s
        attempts = AsyncRetrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_delay(patience),
            wait=wait_random_exponential(multiplier=0.1, max=1.0),
            reraise=True,
        )

        task = asyncio.current_task()
        cancelled_before = task.cancelling() if task else 0

        async def attempt() -> T:
            try:
                return await command()
            finally:
                # redis-py sends under asyncio.wait_for, which before Python 3.12 swallows a cancellation that comes
                # as the sending ends; whoever then waits for the cancelled task would wait for ever.
                if task is not None and task.cancelling() > cancelled_before:
                    raise asyncio.CancelledError

        try:
            return await attempts(attempt)
        except (*_LOST, exceptions.RedisError, UnicodeDecodeError) as error:
            raise self._explain(error, patience) from error

    async def check(self, timeout_s: float) -> None:
        """Raises StreamsError, within about `timeout_s`, unless a Redis of a version that serves answers."""
        try:
            async with asyncio.timeout(timeout_s + 1):  # past the patience below, whose error says more
                info = await self.call(lambda: self.client.info("server"), patience_s=timeout_s)
        except TimeoutError as error:
            raise Unreachable(f"what is at {self.address} said nothing for {timeout_s:g} s; is it Redis?") from error
        version = str(info.get("redis_version", ""))
        if _version(version) < OLDEST_VERSION:
            oldest = ".".join(map(str, OLDEST_VERSION))
            raise WrongServer(f"Redis at {self.address} is version {version or 'unknown'}: {oldest} or later is needed")

    async def close(self) -> None:
        await self.client.aclose()

    def _explain(self, error: BaseException, patience_s: float) -> StreamsError:
        where = f"Redis at {self.address}"
        text = str(error) or type(error).__name__
        if isinstance(error, _DENIED):
            return AccessDenied(f"{where} refuses access; check user and password in redis.url: {text}")
        if isinstance(error, (exceptions.InvalidResponse, UnicodeDecodeError)):
            return WrongServer(f"what answers at {self.address} does not speak Redis's protocol: {text}")
        if isinstance(error, exceptions.BusyLoadingError):
            return Unreachable(f"{where} was still loading its data after {patience_s:g} s")
        if isinstance(error, _LOST):
            return Unreachable(f"{where} did not answer for {patience_s:g} s; is it running? {text}")
        return self._refusal(where, text)

    def _refusal(self, where: str, text: str) -> StreamsError:
        if "MISCONF" in text:
            return WritesRefused(f"{where} refuses writes because it cannot save them; is its disk full? {text}")
        if "OOM" in text or "maxmemory" in text:
            return WritesRefused(f"{where} refuses writes because its memory is full; raise maxmemory: {text}")
        if "READONLY" in text or "read only replica" in text:
            return WritesRefused(f"{where} is a read-only replica; redis.url must name the primary")
        return StreamsError(f"{where}: {text}")


def _may_pass(error: BaseException) -> bool:
    """Whether repeating the command may help."""
    return isinstance(error, _LOST) and not isinstance(error, _DENIED)


def _address(client: Redis) -> str:
    settings: dict[str, Any] = client.connection_pool.connection_kwargs
    return str(settings.get("path") or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
