"""The Redis of a run: one of its own, or the one that the configuration names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from trireme.config import Config
from trireme.launch.rundir import RunDirectory
from trireme.registry import LOCK_SLACK_S, LOCK_TTL_S, Registry
from trireme.streams.connection import Link, open_client
from trireme.streams.embedded import EmbeddedRedis


@contextmanager
def run_redis(config: Config, directory: RunDirectory) -> Iterator[str]:
    """The URL of a Redis that answers; an embedded one ends with the context, and with this process.

    Raises StreamsError when the given one is unreachable, too old or in use by a run of this name, or when the
    embedded one does not start.
    """
    if config.redis.url:
        asyncio.run(_check(config.redis.url, config.redis.connect_timeout_s, config.run.name))
        yield config.redis.url
    else:
        with EmbeddedRedis.start(directory.redis) as server:
            yield server.url


async def _check(url: str, timeout_s: float, run: str) -> None:
    """Raises StreamsError, RunLocked among them: services under the name of a run that goes on elsewhere would take
    from its streams long before their trainer is refused."""
    link = Link(open_client(url, timeout_s))
    try:
        await link.check(timeout_s)
        await Registry(link.client, run).require_no_trainer(LOCK_TTL_S + LOCK_SLACK_S)
    finally:
        await link.close()
