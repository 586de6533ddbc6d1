"""The folder of a run: who may use it, and what it says about the run that does."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self


class RunInUse(Exception):
    """Another process holds the run directory."""


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically; only its owner may read it, for it may hold a Redis password."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)  # a file of that name left by a crash keeps its own mode
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    os.replace(temporary, path)


@dataclass(frozen=True)
class RunState:
    """run.json: how to reach a run from outside. state: starting, running, stopping, finished or failed."""

    run: str
    state: str
    redis_url: str
    pid: int = field(default_factory=os.getpid)
    started_unix_s: float = field(default_factory=time.time)
    exit_code: int | None = None


class RunDirectory:
    """A run's folder, held exclusively from `__enter__` to `__exit__`.

    The lock is the kernel's (flock), not the file's existence: it ends with its holder however that one dies.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self._descriptor: int | None = None

    config = property(lambda self: self.path / "config.yaml")
    logs = property(lambda self: self.path / "logs")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    summary = property(lambda self: self.path / "summary.json")
    hf = property(lambda self: self.path / "hf")
    redis = property(lambda self: self.path / "redis")
    state_file = property(lambda self: self.path / "run.json")
    lock_file = property(lambda self: self.path / ".lock")

    def log(self, name: str) -> Path:
        return Path(self.logs) / f"{name}.log"

    def __enter__(self) -> Self:
        """Raises RunInUse naming the folder and the holder, OSError when the folder cannot be made."""
        self.logs.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise RunInUse(_in_use(self)) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def holder(self) -> int | None:
        """Process id of the `trireme up` that uses the folder now; 0 for one just beginning, None for none.

        A lock file left by a process that is gone counts as none.
        """
        try:
            descriptor = os.open(self.lock_file, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(os.pread(descriptor, 32, 0) or 0)
        finally:
            os.close(descriptor)
        return None

    def save_state(self, state: RunState) -> None:
        write_private(self.state_file, json.dumps(asdict(state), indent=2) + "\n")

    def load_state(self) -> RunState | None:
        """The last saved state, None when there is none that can be read."""
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            return RunState(**json.loads(self.state_file.read_text()))
        return None


def _in_use(directory: RunDirectory) -> str:
    holder = directory.holder()
    by = f" by process {holder}" if holder else ""
    return (
        f"the run directory {directory.path} is in use{by}: stop that run with `trireme down {directory.path}`, "
        "or choose another one with run.dir=…"
    )
