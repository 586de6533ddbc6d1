"""The stream face of the rollout service: prompts in, a sample per entry out.

A prompt is acknowledged in the same step that forwards its whole group, so a worker that dies loses nothing and a
group is there wholly or not at all. Prompts are taken only while their samples are wanted: not more than
`max_concurrent_groups` at once, none while the samples pile up behind, none while the weights are not in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from services.rollout import groups
from services.rollout.engine import Engine, EngineError, RequestRefused
from services.rollout.metrics import GROUPS, GROUPS_RUNNING, count_sample
from services.rollout.updates import NotCaughtUp, WeightKeeper
from trireme.contracts.v1.sample_pb2 import Prompt, Sample
from trireme.streams.base import Entry, Stream
from trireme.streams.errors import StreamsError
from trireme.streams.lease import held

log = logging.getLogger(__name__)

BLOCK_S = 1.0  # how long one take waits, and so how late a stop is noticed at most
PAUSE_S = 0.2  # between looks at a stream that is full or weights that are not in order
RETRY_S = 2.0  # after Redis failed for longer than the streams' own patience


@dataclass(frozen=True)
class Limits:
    """concurrency: groups in work at once. backlog: samples waiting for reward above which no prompt is taken.
    timeout_s: of one group, waiting for its weights included."""

    concurrency: int
    backlog: int
    timeout_s: float


class RolloutWorker:
    """Generates the entries of `prompts` into `samples`. `generated` is told the tokens of each finished sample."""

    def __init__(
        self,
        engine: Engine,
        keeper: WeightKeeper,
        prompts: Stream,
        samples: Stream,
        name: str,
        limits: Limits,
        generated: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self._engine, self._keeper, self._name = engine, keeper, name
        self._prompts, self._samples = prompts, samples
        self._limits, self._generated = limits, generated
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()

    @property
    def running(self) -> int:
        """Groups in work."""
        return len(self._tasks)

    def stop(self) -> None:
        """Take no more; `run` returns when what was taken is forwarded."""
        self._stopping.set()

    async def run(self) -> None:
        """Until `stop`. When cancelled, unfinished prompts are given back and another worker gets them."""
        try:
            while not self._stopping.is_set():
                await self._step()
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _step(self) -> None:
        """Take what there is room for, or wait for room."""
        if self.running >= self._limits.concurrency:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            return
        try:
            if self._keeper.behind or not self._keeper.serving or await self._full():
                await asyncio.sleep(PAUSE_S)
                return
            for entry in await self._prompts.take(self._limits.concurrency - self.running, BLOCK_S):
                self._start(entry)
        except StreamsError as error:
            log.error("cannot take prompts: %s", error)
            await asyncio.sleep(RETRY_S)

    async def _full(self) -> bool:
        return await self._samples.depth() >= self._limits.backlog

    def _start(self, entry: Entry) -> None:
        task = asyncio.create_task(self._handle(entry))
        self._tasks.add(task)
        GROUPS_RUNNING.set(self.running)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        GROUPS_RUNNING.set(self.running)
        if not task.cancelled() and task.exception():
            log.error("generating a group failed", exc_info=task.exception())

    async def _handle(self, entry: Entry) -> None:
        """Generate and forward one group; what can never work goes to the dead letters, the rest is given back."""
        try:
            prompt = self._parse(entry)
        except ValueError as error:
            await self._refuse(entry, error)
            return
        try:
            async with held(self._prompts, [entry]), asyncio.timeout(self._limits.timeout_s):
                await self._keeper.wait_for(prompt.min_weight_version, self._limits.timeout_s)
                await self._serve(entry, prompt)
        except (EngineError, NotCaughtUp, StreamsError, TimeoutError) as error:
            reason = str(error) or f"not finished within {self._limits.timeout_s:g} s"
            log.warning("gave a prompt back: %s", reason, extra={"group": prompt.group_id})
            GROUPS.labels("given_back").inc()

    async def _serve(self, entry: Entry, prompt: Prompt) -> None:
        try:
            made = await self._generate(prompt)
        except RequestRefused as error:
            await self._refuse(entry, error)  # while it is leased: nobody else begins it
        else:
            await self._forward(entry, made)

    async def _refuse(self, entry: Entry, error: Exception) -> None:
        log.error("refused a prompt: %s", error, extra={"entry": entry.id})
        GROUPS.labels("refused").inc()
        await self._prompts.dead_letter(entry, f"rollout: {error}")

    def _parse(self, entry: Entry) -> Prompt:
        """Raises ValueError when the entry is no prompt that could ever be generated."""
        try:
            prompt = Prompt.FromString(entry.data)
        except DecodeError as error:
            raise ValueError(f"not a Prompt: {error}") from error
        groups.check(prompt, self._engine)
        return prompt

    async def _generate(self, prompt: Prompt) -> list[Sample]:
        made = [s async for s in groups.generate(self._engine, prompt, self._name) if isinstance(s, Sample)]
        return sorted(made, key=lambda sample: sample.group_index)

    async def _forward(self, entry: Entry, made: list[Sample]) -> None:
        outputs = [sample.SerializeToString() for sample in made]
        if not await self._prompts.forward(entry, self._samples, outputs):
            GROUPS.labels("duplicate").inc()
            return
        GROUPS.labels("forwarded").inc()
        for sample in made:
            count_sample(sample)
            self._generated(len(sample.response_token_ids))
