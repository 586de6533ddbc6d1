"""Runs a command that ends when the process that asked for it does, however that dies.

`python -I -S tether.py PARENT_PID COMMAND …` (by path, so that it imports nothing of ours) becomes COMMAND. Linux
tells it of the death (SIGTERM); elsewhere this process stays, and watches.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
POLL_S = 0.5


def main(parent: int, command: Sequence[str]) -> None:
    """Never returns."""
    if not sys.platform.startswith("linux"):
        sys.exit(_watch(parent, command))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel knew whom to tell
        sys.exit(1)
    os.execv(command[0], list(command))


def _watch(parent: int, command: Sequence[str]) -> int:
    child = subprocess.Popen(command, close_fds=False)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    while child.poll() is None and os.getppid() == parent:
        time.sleep(POLL_S)
    child.terminate()
    return child.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
