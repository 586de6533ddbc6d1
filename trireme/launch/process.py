"""One process of a run: what it should be, and a handle on the running one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trireme.launch.logs import last_lines
from trireme.registry import Kind

# Logs without delay; a folder called `services` where the user happens to stand must not be taken for ours; and tasks
# that are drawn from sets of text must be drawn alike when a run is resumed.
ALWAYS = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0"}
POLL_S = 0.05
KILL_WAIT_S = 10.0  # for the kernel to free a killed tree's memory


@dataclass(frozen=True)
class ProcessSpec:
    """What to start.

    name: unique in the run, also that of its log. environment: added to that
    of the supervisor. startup_timeout_s: from its start until it answers. restartable: whether the run survives its
    death, because other processes' work does not depend on this one's memory.
    """

    kind: Kind
    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    startup_timeout_s: float = 600.0
    restartable: bool = False


class Process:
    """A running service under its guardian (see `guard`)."""

    def __init__(self, spec: ProcessSpec) -> None:
        """Starts it at once. Raises OSError when not even the guardian can start."""
        self.spec = spec
        self.started_unix_s = time.time()
        self.started_s = time.monotonic()
        self._log_start = spec.log.stat().st_size if spec.log.exists() else 0
        with spec.log.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "trireme.launch.guard", *spec.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ALWAYS, **spec.environment},
                start_new_session=True,  # the terminal's Ctrl-C is for the supervisor alone
            )

    @property
    def pid(self) -> int:
        """Of the guardian; the service is its only child."""
        return self._guard.pid

    def exit_code(self) -> int | None:
        """None while it runs; 128 + signal when a signal ended it."""
        code = self._guard.poll()
        return None if code is None else code if code >= 0 else 128 - code

    def terminate(self) -> None:
        """Ask it to end; it may take its time."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all its descendants now; returns when they are gone."""
        self._signal(signal.SIGQUIT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(KILL_WAIT_S)
            return
        self._guard.kill()
        self._guard.wait()

    def wait(self, timeout_s: float, give_up: Callable[[], bool] = lambda: False) -> bool:
        """True once it has ended; False after `timeout_s` or as soon as `give_up()` says so."""
        deadline = time.monotonic() + timeout_s
        while self.exit_code() is None:
            if time.monotonic() >= deadline or give_up():
                return False
            time.sleep(POLL_S)
        return True

    def last_lines(self, count: int = 20) -> list[str]:
        """The end of what this process, not an earlier one of the same name, wrote into its log."""
        return last_lines(self.spec.log, count, self._log_start)

    def _signal(self, number: signal.Signals) -> None:
        if self._guard.poll() is None:
            self._guard.send_signal(number)
