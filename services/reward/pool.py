"""The process pool that verifiers run in: what they do to their process stays there.

An attempt that takes longer than `timeout_s`, kills its process, raises, or returns nonsense is tried again in another
process, `max_attempts` times in all; then the outcome is an infrastructure failure. It is never a score of 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from services.reward.frames import BEGIN, HEADER, Report, decode, frame
from trireme.config.loader import REDIS_URL_VARIABLE
from trireme.contracts.v1 import reward_pb2

log = logging.getLogger(__name__)
LOOK_S = 0.1  # between two looks at whether a process lives
LAST_WORDS_S = 0.2  # for what a process wrote just before it ended


@dataclass(frozen=True)
class PoolSettings:
    """timeout_s: for one attempt, from the moment the verifier begins. load_timeout_s: for a process to start and load
    a verifier. memory_mib: address space of a process, 0 for no limit. tasks_per_process: then it is replaced, so that
    what verifiers leak is bounded. verifiers: "package.module:Class" of the user's own."""

    workers: int = 2
    timeout_s: float = 10.0
    max_attempts: int = 3
    load_timeout_s: float = 120.0
    memory_mib: int = 4096
    tasks_per_process: int = 2000
    verifiers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judged:
    """A final report, after how many attempts, and the seconds that the last one took."""

    report: Report
    attempts: int
    seconds: float


class ScoringProcess:
    """One child process and its two pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.tasks = 0
        self._killed = False

    @property
    def usable(self) -> bool:
        return not self._killed and self.process.returncode is None

    @classmethod
    async def start(cls, settings: PoolSettings) -> ScoringProcess:
        command = [sys.executable, "-m", "services.reward.scoring_process", "--parent", str(os.getpid())]
        command += ["--memory-mib", str(settings.memory_mib), *settings.verifiers]
        # One thread each: the pool is the parallelism, and BLAS threads would reserve address space per core.
        # Redis is not theirs: they judge text that a model wrote.
        inherited = {name: value for name, value in os.environ.items() if name != REDIS_URL_VARIABLE}
        env = {**inherited, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env=env, start_new_session=True
        )
        return cls(process)

    async def attempt(self, data: bytes, settings: PoolSettings) -> Report:
        """Score one serialized request. A process that took too long or broke off is killed, and the report says so."""
        self.tasks += 1
        try:
            async with asyncio.timeout(settings.load_timeout_s):
                await self._begin(data)
        except TimeoutError:
            self.kill()
            return await self._failed("load", f"the verifier was not loaded within {settings.load_timeout_s:g} s")
        except EOFError:
            return await self._failed("crash", "the scoring process died while the verifier was loaded")
        try:
            async with asyncio.timeout(settings.timeout_s):
                report = decode(await self._read())
        except TimeoutError:
            self.kill()
            return await self._failed("timeout", f"the verifier timed out after {settings.timeout_s:g} s")
        except (EOFError, ValueError):
            return await self._failed("crash", "the verifier's process died")
        if report.cause == "memory":  # what is left of it would fail the next request, which is innocent
            self.kill()
        return report

    async def _begin(self, data: bytes) -> None:
        """Hand the request over and wait until the verifier is loaded. Raises EOFError."""
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):  # a dead process shows as the end of its reports, just below
            self.process.stdin.write(frame(data))
            await self.process.stdin.drain()
        if await self._read() != BEGIN:
            raise EOFError("the scoring process spoke out of turn")

    async def _failed(self, cause: str, reason: str) -> Report:
        return Report("error", reason=f"{reason} ({await self.ended()})", cause=cause)

    async def _read(self) -> bytes:
        """The next frame. Raises EOFError when the process has ended, even if a child of it holds the pipe open."""
        reading, ended = asyncio.create_task(self._frame()), asyncio.create_task(self._gone())
        try:
            await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
            # What it wrote just before its end is still to be read.
            await asyncio.wait({reading}, timeout=LAST_WORDS_S)
            if not reading.done():
                raise EOFError("the scoring process ended")
            return await reading
        except asyncio.IncompleteReadError as error:
            raise EOFError("the scoring process ended") from error
        finally:
            reading.cancel()
            ended.cancel()

    async def _gone(self) -> None:
        """Return when the process itself has ended: asyncio's `wait` also waits until all its pipes are closed."""
        while self.process.returncode is None:
            await asyncio.sleep(LOOK_S)

    async def _frame(self) -> bytes:
        assert self.process.stdout is not None
        header = await self.process.stdout.readexactly(HEADER.size)
        return await self.process.stdout.readexactly(HEADER.unpack(header)[0])

    def kill(self) -> None:
        """Kill the process and whatever it started; safe to call twice."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def ended(self) -> str:
        """Kill if need be, wait, and say how it ended."""
        code = None
        with contextlib.suppress(TimeoutError):  # the pipe may close a moment before the process is reaped
            code = await asyncio.wait_for(self.process.wait(), 0.2)
        self.kill()
        await self.process.wait()
        if code is None:
            return "killed"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class VerifierPool:
    """`settings.workers` slots, each with a process that is started when first needed."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self._idle: asyncio.LifoQueue[ScoringProcess | None] = asyncio.LifoQueue()
        self._all: set[ScoringProcess] = set()
        for _ in range(settings.workers):
            self._idle.put_nowait(None)

    async def __aenter__(self) -> VerifierPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start all processes now, so that the first requests need not wait for them."""
        started = [await self._fresh(self._idle.get_nowait()) for _ in range(self._idle.qsize())]
        for process in started:
            self._idle.put_nowait(process)

    async def close(self) -> None:
        """Kill every process and wait until it is gone."""
        for process in list(self._all):
            await self._discard(process)

    async def score_all(self, requests: Sequence[reward_pb2.ScoreRequest]) -> list[Judged]:
        """One result per request, in their order."""
        return list(await asyncio.gather(*(self.score(r) for r in requests)))

    async def score(self, request: reward_pb2.ScoreRequest) -> Judged:
        """The outcome of one request; its report is never of kind "error". Cancelling it kills its process."""
        data, judged = request.SerializeToString(), None
        for number in range(1, self.settings.max_attempts + 1):
            judged = await self._attempt(data, number)
            if judged.report.kind != "error":
                return judged
            log.warning("attempt %d at %s: %s", number, request.id, judged.report.reason)
        assert judged is not None
        return replace(judged, report=replace(judged.report, kind="infrastructure_failure"))

    async def _attempt(self, data: bytes, number: int) -> Judged:
        async with self._slot() as process:
            started = time.perf_counter()
            report = await process.attempt(data, self.settings)
            return Judged(report, number, time.perf_counter() - started)

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[ScoringProcess]:
        """A live process for the length of the block; the slot is given back whatever happens in it."""
        process = await self._idle.get()
        try:
            process = await self._fresh(process)
            yield process
            if process.tasks >= self.settings.tasks_per_process:
                process.kill()
        except BaseException:  # cancelled half-way: its answer would be taken for that of the next request
            if process is not None:
                process.kill()
            raise
        finally:
            self._idle.put_nowait(process)

    async def _fresh(self, process: ScoringProcess | None) -> ScoringProcess:
        if process is not None and process.usable:
            return process
        await self._discard(process)
        started = await ScoringProcess.start(self.settings)
        self._all.add(started)
        return started

    async def _discard(self, process: ScoringProcess | None) -> None:
        if process is not None:
            await process.ended()
            self._all.discard(process)
