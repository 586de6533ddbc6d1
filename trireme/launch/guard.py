"""A guardian process between `trireme up` and one service: when either of the two goes, nothing of the service stays.

Run as `python -m trireme.launch.guard COMMAND ...` with a pipe as standard input whose other end only the supervisor
holds. Why not merely a parent-death signal: services have descendants in sessions of their own (torchrun's workers,
vLLM's engine core), which neither such a signal nor killing a process group reaches. The guardian is their subreaper,
so every descendant, however deep and whoever orphaned it, stays below it in the process tree and can be found.

  SIGTERM, SIGINT      passed on to the service, which may take its time
  SIGQUIT              kills the whole tree now
  end of input         the supervisor is gone: SIGTERM, GRACE_S later SIGKILL
  the service ends     kills what it left behind; exits with its code (128 + signal when a signal ended it)

Only the standard library is imported here: a guardian costs a few MB and 20 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

GRACE_S = 5.0  # a service whose supervisor was killed may use this to remove its shared memory
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
COMMAND_NOT_RUN = 127
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD)


def main(command: Sequence[str]) -> int:
    """Run `command` until it or the supervisor ends; returns the exit code to report."""
    wakeup = _wakeup_pipe()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = _spawn(command)
    code = _watch(child, wakeup)
    kill_tree(os.getpid())
    return code


def descendants(root: int) -> set[int]:
    """Process ids of all that `root` is an ancestor of, at this moment: call it again until nothing is new."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)):
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    todo = [root]
    while todo:
        fresh = set(children.get(todo.pop(), ())) - found
        found |= fresh
        todo.extend(fresh)
    return found


def kill_tree(root: int) -> None:
    """SIGKILL every descendant of `root`, again and again until none is born any more and all are reaped."""
    while left := descendants(root):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.01)


def _parent(entry: Path) -> int | None:
    """From /proc/PID; the command in `stat` may hold any character, so split at its last bracket."""
    try:
        return int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _wakeup_pipe() -> int:
    """File descriptor that yields one byte, the number, for each signal received."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in HANDLED:
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return reader


def _spawn(command: Sequence[str]) -> int:
    """Process id of `command`, leader of its own session and process group."""
    parent = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)  # one passed on right now waits until the child can take it
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        return pid
    try:
        _become(command, parent)
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(COMMAND_NOT_RUN)


def _become(command: Sequence[str], parent: int) -> None:
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the guardian died before the line above took effect
        os._exit(COMMAND_NOT_RUN)
    for number in (*HANDLED, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execvp(command[0], list(command))


def _watch(child: int, wakeup: int) -> int:
    deadline: float | None = None  # set once the supervisor is gone
    sources = [0, wakeup]
    while True:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select(sources, [], [], timeout)
        if wakeup in ready:
            _pass_on(child, os.read(wakeup, 64))
        if 0 in ready and not os.read(0, 64):
            sources.remove(0)
            deadline = time.monotonic() + GRACE_S
            _signal(child, signal.SIGTERM)
        if deadline is not None and time.monotonic() >= deadline:
            return 128 + signal.SIGKILL
        code = _reap().get(child)
        if code is not None:
            return code


def _pass_on(child: int, numbers: bytes) -> None:
    for number in numbers:
        if number in (signal.SIGTERM, signal.SIGINT):
            _signal(child, number)
        elif number == signal.SIGQUIT:
            kill_tree(os.getpid())
            os._exit(128 + signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap() -> dict[int, int]:
    """Exit codes by process id of the children that ended since the last call."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(found[1])
            ended[found[0]] = code if code >= 0 else 128 - code
    return ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
