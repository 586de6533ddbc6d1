"""`trireme down`: stop a run that another terminal, or nobody, looks after."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

from trireme.cli.console import out
from trireme.cli.runs import find_run
from trireme.launch.interrupts import TOGETHER_S
from trireme.launch.rundir import RunDirectory

POLL_S = 0.1
LAST_WORDS_S = 20.0  # to print the summary and end, after the directory is released
SECOND_SIGNAL_S = TOGETHER_S + 0.3  # one sooner would count as the first


def down(run_dir: Path | None, *, now: bool) -> int:
    """Returns 0 once the run's process has ended, also when there was nothing to stop."""
    directory = find_run(run_dir)
    pid = _holder(directory)
    if pid is None:
        out.print(f"no run is going on in {directory.path}", highlight=False, soft_wrap=True)
        return 0
    out.print(f"stopping the run in {directory.path} (process {pid}) …", highlight=False, soft_wrap=True)
    os.kill(pid, signal.SIGTERM)
    if now:
        time.sleep(SECOND_SIGNAL_S)
        if directory.holder() == pid:
            os.kill(pid, signal.SIGTERM)
    _wait(directory, pid)
    state = directory.load_state()
    out.print(f"stopped; it {state.state}" if state and state.exit_code is not None else "stopped", highlight=False)
    return 0


def _holder(directory: RunDirectory) -> int | None:
    """Waits out the instant in which a beginning run has the lock but has not yet written its number."""
    while (pid := directory.holder()) == 0:
        time.sleep(POLL_S)
    return pid


def _wait(directory: RunDirectory, pid: int) -> None:
    """Until the directory is free and the process, which then only prints its summary, is gone."""
    while directory.holder() == pid:
        time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        select.select([process], [], [], LAST_WORDS_S)
        os.close(process)
