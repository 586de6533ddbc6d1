"""What tests of every part share: a real Redis server, and names and ports that nobody else uses."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator

import pytest

from trireme.streams.embedded import EmbeddedRedis


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Redis server that lives as long as the tests. Tests keep apart by their run names."""
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def run_name() -> str:
    """A run that no other test knows."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
