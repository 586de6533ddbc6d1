"""The supervisor with small real processes, and a probe that is told what to answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trireme.launch.process import Process, ProcessSpec
from trireme.launch.restarts import RestartPolicy
from trireme.launch.supervisor import Event, Interrupted, Stage, StartupFailed, Supervisor

SLEEP = "import time; time.sleep(1000)"
POLICY = RestartPolicy(limit=2, first_s=0.05, factor=2.0, longest_s=1.0, settled_s=1000.0)


class FakeProbe:
    """Everything is healthy, except what a test says is not."""

    def __init__(self) -> None:
        self.unhealthy: set[str] = set()

    def ready(self, process: Process) -> bool:
        return process.exit_code() is None and process.spec.name not in self.unhealthy


class Bench:
    """A supervisor whose events are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.probe, self.events, self.stop = folder, FakeProbe(), list[Event](), False
        self.supervisor = Supervisor(self.probe, self.events.append, lambda: self.stop, POLICY)

    def spec(self, name: str, code: str = SLEEP, timeout_s: float = 60, restartable: bool = True) -> ProcessSpec:
        command = [sys.executable, "-c", code]
        return ProcessSpec("rollout", name, command, self.folder / f"{name}.log", {}, timeout_s, restartable)

    def poll_until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not true():
            assert time.monotonic() < deadline, self.events
            self.supervisor.poll()
            time.sleep(0.02)

    def stages(self, name: str) -> list[Stage]:
        return [event.stage for event in self.events if event.name == name]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.supervisor.kill_all()


def test_start_returns_when_all_are_healthy_and_stop_ends_them(bench: Bench) -> None:
    bench.supervisor.start([bench.spec("a"), bench.spec("b")])
    assert bench.stages("a") == bench.stages("b") == [Stage.STARTING, Stage.HEALTHY]
    bench.supervisor.stop(["a", "b"])
    assert all(service.process.exit_code() is not None for service in bench.supervisor.services.values())
    assert bench.stages("a")[-1] is Stage.STOPPED


def test_a_death_while_starting_is_reported_with_the_last_lines(bench: Bench) -> None:
    bench.probe.unhealthy.add("b")
    with pytest.raises(StartupFailed) as caught:
        bench.supervisor.start([bench.spec("a"), bench.spec("b", "print('why it died'); raise SystemExit(3)")])
    message = str(caught.value)
    assert "b ended with code 3 while starting" in message
    assert str(bench.folder / "b.log") in message and "why it died" in message


def test_a_death_of_one_that_had_come_up_ends_the_start(bench: Bench) -> None:
    """Not when the slowest has had all its time: the trainer may find a full disk while an engine is still loading."""
    bench.probe.unhealthy.add("slow")
    trainer = bench.spec("trainer", "import time; time.sleep(1.5); raise SystemExit(3)", restartable=False)
    with pytest.raises(StartupFailed, match="trainer ended with code 3") as caught:
        bench.supervisor.start([bench.spec("slow"), trainer])
    assert (caught.value.name, caught.value.code) == ("trainer", 3)
    assert bench.stages("trainer") == [Stage.STARTING, Stage.HEALTHY, Stage.LOST]


def test_only_lines_of_this_process_are_shown(bench: Bench) -> None:
    (bench.folder / "b.log").write_text("of an earlier run\n")
    bench.probe.unhealthy.add("b")
    with pytest.raises(StartupFailed) as caught:
        bench.supervisor.start([bench.spec("b", "raise SystemExit(3)")])
    assert "of an earlier run" not in str(caught.value)


def test_never_healthy_is_an_error_after_the_timeout(bench: Bench) -> None:
    bench.probe.unhealthy.add("a")
    with pytest.raises(StartupFailed, match=r"a did not become healthy within 0\.3 s"):
        bench.supervisor.start([bench.spec("a", timeout_s=0.3)])


def test_a_start_can_be_interrupted(bench: Bench) -> None:
    bench.probe.unhealthy.add("a")
    bench.stop = True
    with pytest.raises(Interrupted):
        bench.supervisor.start([bench.spec("a")])


def test_a_death_is_answered_by_a_restart(bench: Bench) -> None:
    bench.supervisor.start([bench.spec("a")])
    first = bench.supervisor.services["a"].process
    first.kill()
    bench.poll_until(lambda: bench.stages("a").count(Stage.HEALTHY) == 2)
    assert bench.stages("a") == [Stage.STARTING, Stage.HEALTHY, Stage.WAITING, Stage.STARTING, Stage.HEALTHY]
    assert bench.supervisor.services["a"].process.pid != first.pid


def test_a_crash_loop_ends_after_the_limit(bench: Bench) -> None:
    bench.supervisor.start([bench.spec("a", "import time; print('crash', flush=True); time.sleep(1.5)")])
    bench.poll_until(lambda: bench.stages("a")[-1] is Stage.LOST)
    assert bench.stages("a").count(Stage.WAITING) == POLICY.limit
    assert "its log is" in bench.events[-1].detail and "crash" in bench.events[-1].detail


def test_a_restarted_service_that_never_answers_is_killed_and_counted(bench: Bench) -> None:
    bench.supervisor.start([bench.spec("a", timeout_s=1.0)])
    bench.probe.unhealthy.add("a")
    bench.supervisor.services["a"].process.kill()
    bench.poll_until(lambda: bench.stages("a")[-1] is Stage.LOST)
    assert bench.supervisor.services["a"].process.exit_code() is not None


def test_what_may_not_be_restarted_is_lost_or_ended(bench: Bench) -> None:
    codes = {"good": 0, "bad": 4}
    wait = "import time; time.sleep(1.5); raise SystemExit({})"
    bench.supervisor.start([bench.spec(name, wait.format(code), restartable=False) for name, code in codes.items()])
    bench.poll_until(lambda: bench.supervisor.services["good"].stage.final and bench.stages("bad")[-1].final)
    assert bench.stages("good")[-1] is Stage.ENDED
    assert bench.stages("bad")[-1] is Stage.LOST


def test_a_service_that_will_not_end_is_killed_when_in_a_hurry(bench: Bench) -> None:
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    bench.supervisor.start([bench.spec("a", f"{ignore} print('deaf', flush=True); time.sleep(1000)")])
    log = bench.folder / "a.log"
    bench.poll_until(lambda: "deaf" in log.read_text())
    started = time.monotonic()
    bench.supervisor.stop(["a"], hurry=lambda: True)
    assert bench.supervisor.services["a"].process.exit_code() is not None
    assert time.monotonic() - started < 10
