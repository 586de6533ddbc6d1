"""The guardian: real processes that fork away, ignore signals, or whose supervisor vanishes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from trireme.launch.guard import descendants

# Three generations, each in a session of its own; the middle one leaves, so that the last is an orphan.
ORPHAN = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(1000)"
DEEP = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {ORPHAN!r}]).wait(); time.sleep(1000)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(1000)"


def start(*command: str) -> subprocess.Popen[bytes]:
    guard = [sys.executable, "-m", "trireme.launch.guard", *command]
    return subprocess.Popen(guard, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def python(code: str) -> subprocess.Popen[bytes]:
    return start(sys.executable, "-c", code)


def output_of(guard: subprocess.Popen[bytes]) -> bytes:
    """All that it writes. (`communicate` would close its input, which means something here.)"""
    assert guard.stdout is not None
    return guard.stdout.read()


def until(true: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"still not so after {timeout_s} s"
        time.sleep(0.02)


def gone(pids: set[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def started_deep() -> tuple[subprocess.Popen[bytes], set[int]]:
    """A guardian with a service that has an orphan, and all their descendants."""
    guard = python(DEEP)
    until(lambda: _orphan_of(guard.pid) is not None and len(descendants(guard.pid)) == 2)
    return guard, descendants(guard.pid)


def _orphan_of(guard: int) -> int | None:
    """A child of the guardian that is not the service: it was handed over when its own parent left."""
    children = {pid for pid in descendants(guard) if _parent(pid) == guard}
    return max(children) if len(children) == 2 else None


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return 0


def test_exit_codes_pass_through() -> None:
    for code, wanted in (("pass", 0), ("raise SystemExit(5)", 5), ("import os; os.kill(os.getpid(), 9)", 137)):
        assert python(code).wait(20) == wanted


def test_a_command_that_does_not_exist_says_so() -> None:
    guard = start("/no/such/program")
    assert output_of(guard) == b"cannot run /no/such/program: No such file or directory\n"
    assert guard.wait(20) == 127


def test_the_service_reads_nothing_and_leads_its_own_group() -> None:
    code = "import os, sys; print(repr(sys.stdin.read()), os.getpgrp() == os.getpid() == os.getsid(0))"
    assert output_of(python(code)) == b"'' True\n"


def test_a_supervisor_that_vanishes_takes_everything_along() -> None:
    guard, pids = started_deep()
    assert guard.stdin is not None
    guard.stdin.close()  # what the kernel does to a killed supervisor's end of the pipe
    until(lambda: gone(pids))
    assert guard.wait(5) != 0


def test_what_the_service_leaves_behind_is_killed() -> None:
    guard, pids = started_deep()
    service = min(pid for pid in pids if _parent(pid) == guard.pid)
    os.kill(service, signal.SIGKILL)
    assert guard.wait(20) == 137
    assert gone(pids)


def test_terminate_is_the_services_to_answer() -> None:
    handler = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9));"
    guard = python(f"{handler} print('up', flush=True); time.sleep(1000)")
    assert guard.stdout is not None and guard.stdout.readline() == b"up\n"
    guard.terminate()
    assert guard.wait(20) == 9


def test_quit_kills_a_service_that_ignores_terminate() -> None:
    guard = python(DEAF)
    assert guard.stdout is not None and guard.stdout.readline() == b"deaf\n"
    pids = descendants(guard.pid)
    guard.terminate()
    time.sleep(0.3)
    assert guard.poll() is None and not gone(pids)
    guard.send_signal(signal.SIGQUIT)
    guard.wait(20)
    assert gone(pids)


def test_a_killed_guardian_takes_the_service_along() -> None:
    guard = python(DEAF)
    assert guard.stdout is not None and guard.stdout.readline() == b"deaf\n"
    pids = descendants(guard.pid)
    guard.kill()
    guard.wait()
    until(lambda: gone(pids))
