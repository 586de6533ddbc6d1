"""`redis`: the server that holds the streams and the registry."""

from __future__ import annotations

from pydantic import Field

from trireme.config.base import Block


class RedisConfig(Block):
    """Address of the Redis server."""

    url: str | None = Field(
        None,
        pattern=r"^(redis|rediss|unix)://",
        description="redis://[user:password@]host:port/db, rediss:// or unix://; null starts an embedded server. "
        "The environment variable TRIREME_REDIS_URL takes its place.",
    )
    connect_timeout_s: float = Field(10.0, gt=0, description="Seconds until an unreachable server is an error.")
