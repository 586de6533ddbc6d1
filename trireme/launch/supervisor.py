"""Starts processes in order, waits until they answer, restarts those that may be, stops them in order.

Knows nothing of models, Redis or gRPC: whether a service answers is the Probe's word. Single-threaded: whoever owns it
calls `poll` a few times a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from trireme.launch.process import Process, ProcessSpec
from trireme.launch.restarts import RestartPolicy, Restarts

LOOK_S = 0.25  # between two looks at the processes; each asks Redis and services
TERMINATE_S = 20.0  # a service that is asked to end and does not within this time is killed


class Probe(Protocol):
    """Says whether a service answers. Implementation: `health.RegistryProbe`."""

    def ready(self, process: Process) -> bool:
        """True once this very process, not an earlier one of its name, serves. Must return within a second or two."""
        ...


class Stage(Enum):
    """Where a service stands. The last three are final."""

    STARTING = "starting"
    HEALTHY = "healthy"
    WAITING = "restarting"  # died; the next start is due later
    ENDED = "finished"  # by itself, with code 0
    LOST = "lost"  # failed, and is not started again
    STOPPED = "stopped"

    @property
    def final(self) -> bool:
        return self in (Stage.ENDED, Stage.LOST, Stage.STOPPED)


@dataclass(frozen=True)
class Event:
    """Something to tell the user. detail: for people, may be empty."""

    name: str
    stage: Stage
    detail: str = ""


class StartupFailed(Exception):
    """A service did not come up; the message names it, its log and what it last said. `code`: what it ended with."""

    def __init__(self, message: str, name: str, code: int | None = None) -> None:
        super().__init__(message)
        self.name, self.code = name, code


class Interrupted(Exception):
    """The user asked to stop before everything was up."""


class Service:
    """What the supervisor knows of one service."""

    def __init__(self, spec: ProcessSpec, policy: RestartPolicy) -> None:
        self.spec = spec
        self.restarts = Restarts(policy)
        self.process = Process(spec)
        self.stage = Stage.STARTING
        self.due_s = 0.0  # of the next start, while WAITING
        self.last_words = ""  # detail of its last change

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.process.started_s

    def start_again(self) -> None:
        self.process = Process(self.spec)
        self.stage = Stage.STARTING


class Supervisor:
    """The processes of one run, in the order they were started."""

    def __init__(
        self,
        probe: Probe,
        tell: Callable[[Event], None] = lambda event: None,
        interrupted: Callable[[], bool] = lambda: False,
        policy: RestartPolicy | None = None,
    ) -> None:
        """`interrupted` ends a start-up with Interrupted as soon as it says True."""
        self._probe = probe
        self._tell = tell
        self._interrupted = interrupted
        self._policy = policy or RestartPolicy()
        self.services: dict[str, Service] = {}

    def start(self, specs: Sequence[ProcessSpec]) -> None:
        """Start them in the given order and return when all are healthy. Raises StartupFailed, Interrupted."""
        fresh = [self._launch(spec) for spec in specs]
        while waiting := [service for service in fresh if service.stage is Stage.STARTING]:
            if self._interrupted():
                raise Interrupted
            for service in waiting:
                self._first_start(service)
            self._poll(service for service in self.services.values() if service not in waiting)
            for service in fresh:
                if service.stage is Stage.LOST:
                    raise StartupFailed(service.last_words, service.spec.name, service.process.exit_code())
            time.sleep(LOOK_S)

    def poll(self) -> None:
        """Look after everything once: note deaths, restart what is due, see whether the restarted ones answer."""
        self._poll(self.services.values())

    def _poll(self, services: Iterable[Service]) -> None:
        for service in services:
            if service.stage in (Stage.STARTING, Stage.HEALTHY):
                self._look_after(service)
            elif service.stage is Stage.WAITING and time.monotonic() >= service.due_s:
                service.start_again()
                self._move(service, Stage.STARTING)

    def stop(self, names: Sequence[str], hurry: Callable[[], bool] = lambda: False) -> None:
        """End these, all at the same time; kills what is left after TERMINATE_S or when `hurry()` says so."""
        services = [self.services[name] for name in names if name in self.services]
        for service in services:
            service.process.terminate()
        deadline = time.monotonic() + TERMINATE_S
        for service in services:
            if not service.process.wait(deadline - time.monotonic(), hurry):
                service.process.kill()
            if not service.stage.final:
                self._move(service, Stage.STOPPED)

    def kill_all(self) -> None:
        """Leave nothing, whatever state things are in; latest started first. Without a message."""
        for service in reversed(self.services.values()):
            service.process.kill()

    def _launch(self, spec: ProcessSpec) -> Service:
        service = self.services[spec.name] = Service(spec, self._policy)
        self._move(service, Stage.STARTING)
        return service

    def _first_start(self, service: Service) -> None:
        code, limit = service.process.exit_code(), service.spec.startup_timeout_s
        if code == 0 and not service.spec.restartable:
            self._move(service, Stage.ENDED)  # a run with nothing left to do
        elif code is not None:
            raise StartupFailed(failure(service, f"ended with code {code} while starting"), service.spec.name, code)
        elif self._probe.ready(service.process):
            self._move(service, Stage.HEALTHY, f"{service.age_s:.0f} s")
        elif service.age_s > limit:
            raise StartupFailed(failure(service, f"did not become healthy within {limit:g} s"), service.spec.name)

    def _look_after(self, service: Service) -> None:
        code = service.process.exit_code()
        if code is not None:
            self._died(service, f"ended with code {code}")
        elif service.stage is Stage.STARTING and self._probe.ready(service.process):
            self._move(service, Stage.HEALTHY, f"{service.age_s:.0f} s")
        elif service.stage is Stage.STARTING and service.age_s > service.spec.startup_timeout_s:
            service.process.kill()
            self._died(service, "did not become healthy")

    def _died(self, service: Service, how: str) -> None:
        if not service.spec.restartable and service.process.exit_code() == 0:
            self._move(service, Stage.ENDED)
            return
        delay = service.restarts.next_delay_s(service.age_s) if service.spec.restartable else None
        if delay is None:
            self._move(service, Stage.LOST, failure(service, how))
            return
        service.due_s = time.monotonic() + delay
        self._move(service, Stage.WAITING, f"{how}; starting it again in {delay:g} s (log: {service.spec.log})")

    def _move(self, service: Service, stage: Stage, detail: str = "") -> None:
        service.stage, service.last_words = stage, detail
        self._tell(Event(service.spec.name, stage, detail))


def failure(service: Service, how: str) -> str:
    """One message with all that a user needs in order to find out why."""
    lines = "\n".join(f"    {line}" for line in service.process.last_lines())
    return f"{service.spec.name} {how}; its log is {service.spec.log} and ends with\n{lines or '    (nothing)'}"
