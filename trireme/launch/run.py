"""One run from first process to last: start in order, watch until the trainer ends, stop in order, leave nothing."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from trireme.contracts.v1 import trainer_pb2
from trireme.launch.health import RegistryProbe, drain_trainer, trainer_status
from trireme.launch.interrupts import Interrupts
from trireme.launch.process import ProcessSpec
from trireme.launch.restarts import RestartPolicy
from trireme.launch.rundir import RunDirectory, RunState
from trireme.launch.supervisor import LOOK_S, Event, Interrupted, StartupFailed, Supervisor

TRAINER = "trainer"
STATUS_S = 1.0  # between two questions to the trainer
REDIS_PATIENCE_S = 90.0  # longer than the services', who put up with a restart of it
UNANSWERED_S = 120.0  # for one that did not answer and was sent SIGTERM instead
DRAIN_S = 1800.0  # a step of a large model and its checkpoint; a second Ctrl-C does not wait
FAILED = 1
INTERRUPTED = 130


class View(Protocol):
    """Where a run shows what happens. follows: whether it wants the trainer's status."""

    follows: bool

    def event(self, event: Event) -> None:
        """A service started, answered, died, is restarted, was stopped."""
        ...

    def row(self, metrics: dict[str, Any]) -> None:
        """A new line of metrics.jsonl."""
        ...

    def status(self, status: trainer_pb2.TrainerStatus | None) -> None:
        """What the trainer says now, once a second."""
        ...

    def say(self, message: str) -> None:
        """A sentence for the user."""
        ...


class RunFailed(Exception):
    """The run could not start or go on; the message is for the user. `code`: what the command should end with."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


class MetricsTail:
    """New complete lines of a metrics.jsonl that another process appends to."""

    def __init__(self, path: Path) -> None:
        """Lines that are there already belong to an earlier part of the run and are skipped."""
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def rows(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            # A resumed trainer drops the rows of steps that it takes again, and may have written others since.
            self._offset = min(self._offset, file.seek(0, os.SEEK_END))
            file.seek(max(0, self._offset - 1))
            if self._offset and file.read(1) != b"\n":
                self._offset += len(file.readline())
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            with contextlib.suppress(ValueError):  # showing a run must not end it
                yield json.loads(line)


class Run:
    """A run whose directory is held. The processes belong to it from `execute` until that returns or raises."""

    def __init__(
        self,
        processes: Sequence[ProcessSpec],
        directory: RunDirectory,
        view: View,
        interrupts: Interrupts,
        state: RunState,
    ) -> None:
        self._processes, self._directory, self._view, self._interrupts = processes, directory, view, interrupts
        self._state = state
        self._tail = MetricsTail(directory.metrics)
        self._asked_s = 0.0  # when the trainer was last asked for its status
        self._known_address: str | None = None  # of the trainer, when it was last heard of

    def execute(self, policy: RestartPolicy | None = None) -> int:
        """Everything from the first process to the last; returns the exit code of the run.

        That is the trainer's, or INTERRUPTED when the user stopped the run before everything was healthy.
        Raises RunFailed when the run could not start or go on; by then everything has been stopped.
        """
        with RegistryProbe(self._state.redis_url, self._state.run) as self._probe:
            self._supervisor = Supervisor(self._probe, self._view.event, self._interrupts.requested, policy)
            self._save("starting")
            code = FAILED
            try:
                code = self._run()
            except RunFailed as error:
                code = error.code
                raise
            finally:
                self._supervisor.kill_all()  # nothing is left by now, unless something unforeseen was raised
                self._save("failed" if code else "finished", code)
            return code

    def _run(self) -> int:
        trouble, code = None, None
        try:
            self._supervisor.start(self._processes)
            self._save("running")
            self._watch(self._interrupts.requested)
        except Interrupted:
            code = INTERRUPTED
        except StartupFailed as error:
            trouble = RunFailed(str(error), error.code if error.name == TRAINER and error.code else FAILED)
        except RunFailed as error:
            trouble = error
        self._stop()
        if trouble:
            raise trouble
        return self._exit_code() if code is None else code

    def _watch(self, give_up: Callable[[], bool]) -> None:
        """Until the trainer has ended or `give_up()` says so. Raises RunFailed when the run cannot go on."""
        trainer = self._supervisor.services[TRAINER]
        while trainer.process.exit_code() is None and not give_up():
            self._supervisor.poll()
            self._require_enough()
            self._show()
            time.sleep(LOOK_S)
        self._supervisor.poll()
        self._show()

    def _require_enough(self) -> None:
        """Replicas that are given up are bearable as long as one of their kind is left, and while Redis answers."""
        if (silent_s := self._probe.redis_silent_s()) > REDIS_PATIENCE_S:
            raise RunFailed(f"Redis has not answered for {silent_s:.0f} s")
        left = {service.spec.kind for service in self._supervisor.services.values() if not service.stage.final}
        for service in self._supervisor.services.values():
            if service.spec.kind not in (left | {TRAINER}):
                raise RunFailed(f"no {service.spec.kind} is left: {service.last_words}")

    def _show(self) -> None:
        for row in self._tail.rows():
            self._view.row(row)
        if self._view.follows and time.monotonic() - self._asked_s >= STATUS_S:
            self._asked_s = time.monotonic()
            address = self._trainer_address()
            self._view.status(trainer_status(address) if address else None)

    def _trainer_address(self) -> str | None:
        """Where the trainer serves, or did when Redis last said so; None before it ever served."""
        record = self._probe.record(self._supervisor.services[TRAINER].process)
        if record:
            self._known_address = record.address
        return self._known_address

    def _stop(self) -> None:
        """The trainer first, so that it can finish its step with the others' help and checkpoint."""
        with contextlib.suppress(OSError):  # a full disk must not cost the checkpoint of which it may leave room
            self._save("stopping")
        if TRAINER in self._supervisor.services:
            self._drain()
        for kind in ("rollout", "reward"):
            names = [name for name, service in self._supervisor.services.items() if service.spec.kind == kind]
            self._supervisor.stop(names, self._interrupts.urgent)

    def _drain(self) -> None:
        """One that serves may take as long as its step and checkpoint do; one that does not has nothing to lose."""
        process, address = self._supervisor.services[TRAINER].process, self._trainer_address()
        if process.exit_code() is None and address:
            self._view.say("asking the trainer to finish its step and checkpoint; Ctrl-C again to kill it")
            answered = drain_trainer(address)
            if not answered:
                process.terminate()
            deadline = time.monotonic() + (DRAIN_S if answered else UNANSWERED_S)
            with contextlib.suppress(RunFailed):  # then it cannot finish its step, and is stopped below
                self._watch(lambda: self._interrupts.urgent() or time.monotonic() >= deadline)
        self._supervisor.stop([TRAINER], self._interrupts.urgent)

    def _exit_code(self) -> int:
        code = self._supervisor.services[TRAINER].process.exit_code()
        return FAILED if code is None else code

    def _save(self, state: str, code: int | None = None) -> None:
        self._state = replace(self._state, state=state, exit_code=code)
        self._directory.save_state(self._state)
