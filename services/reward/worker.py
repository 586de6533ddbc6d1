"""The stream face of the service: samples in, the same samples with a reward out.

An entry is acknowledged in the same step that forwards it, so a worker that dies loses nothing: its entries go to
another when their leases end. No more entries are taken than are being scored, so a slow scorer holds back the stream
and not the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging

from google.protobuf.message import DecodeError

from services.reward.service import BadRequest, Scoring
from trireme.contracts import rewards
from trireme.contracts.v1 import reward_pb2, sample_pb2
from trireme.streams.base import Entry, Stream
from trireme.streams.errors import StreamsError

log = logging.getLogger(__name__)

BLOCK_S = 1.0  # how long one take waits, and so how late a stop is noticed at most
RETRY_S = 2.0  # pause after the streams failed for longer than their own patience
RENEWALS_PER_LEASE = 3


def score_request(sample: sample_pb2.Sample) -> reward_pb2.ScoreRequest:
    return reward_pb2.ScoreRequest(
        id=sample.id,
        task=sample.task,
        prompt_text=sample.prompt_text,
        response_text=sample.response_text,
        finish_reason=sample.finish_reason,
        trace_id=sample.trace_id,
    )


def sample_of(data: bytes) -> sample_pb2.Sample:
    """Raises ValueError with the reason when the data is no sample that anybody could use."""
    try:
        sample = sample_pb2.Sample.FromString(data)
    except DecodeError as error:
        raise ValueError(f"not a Sample: {error}") from error
    if not sample.id:
        raise ValueError("not a Sample: it has no id")
    return sample


class RewardWorker:
    """Scores entries of `samples` into `scored`. concurrency: entries held at once. lease_s: as the streams have it."""

    def __init__(self, scoring: Scoring, samples: Stream, scored: Stream, *, concurrency: int, lease_s: float) -> None:
        self._scoring, self._samples, self._scored = scoring, samples, scored
        self._concurrency, self._lease_s = concurrency, lease_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()

    @property
    def running(self) -> int:
        return len(self._tasks)

    def stop(self) -> None:
        """Take no more; `run` returns when what was taken is forwarded."""
        self._stopping.set()

    async def run(self) -> None:
        """Until `stop`. When cancelled, what is unfinished stays leased and another worker gets it."""
        renewing = asyncio.create_task(self._keep_leases())
        try:
            while not self._stopping.is_set():
                await self._take()
            while self._tasks:
                await asyncio.wait(self._tasks.values())
        finally:
            for task in [renewing, *self._tasks.values()]:
                task.cancel()
            await asyncio.gather(renewing, *self._tasks.values(), return_exceptions=True)

    async def _take(self) -> None:
        """Take what there is room for; wait for room when there is none."""
        room = self._concurrency - len(self._tasks)
        if room <= 0:
            await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            return
        try:
            entries = await self._samples.take(room, BLOCK_S)
        except StreamsError as error:
            log.error("cannot take samples: %s", error)
            await asyncio.sleep(RETRY_S)
            return
        for entry in entries:
            self._start(entry)

    def _start(self, entry: Entry) -> None:
        if entry.id in self._tasks:  # our own lease ran out and we claimed it again: it is being scored already
            return
        task = asyncio.create_task(self._handle(entry))
        self._tasks[entry.id] = task
        task.add_done_callback(functools.partial(self._ended, entry.id))

    def _ended(self, entry_id: str, task: asyncio.Task[None]) -> None:
        """An entry whose handling broke off stays leased: it is delivered again, in the end to the dead letters."""
        del self._tasks[entry_id]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("entry %s broke its handling", entry_id, exc_info=error)

    async def _handle(self, entry: Entry) -> None:
        """Score one entry and pass it on. What fails here is delivered again, in the end to the dead letters."""
        try:
            sample = sample_of(entry.data)
        except ValueError as error:
            log.error("entry %s goes to the dead letters: %s", entry.id, error)
            await self._samples.dead_letter(entry, str(error))
            return
        try:
            sample.reward.CopyFrom(await self._score(sample))
            await self._samples.forward(entry, self._scored, [sample.SerializeToString()])
        except StreamsError as error:
            log.error("sample %s stays leased and will be delivered again: %s", sample.id, error)

    async def _score(self, sample: sample_pb2.Sample) -> sample_pb2.Reward:
        """A task that nobody can score is our failure: the sample goes on, masked, and completes its group."""
        try:
            return await self._scoring.score(score_request(sample))
        except BadRequest as error:
            log.error("sample %s cannot be scored: %s", sample.id, error)
            return rewards.infrastructure_failure(str(error), 1, verifier=sample.task.verifier)

    async def _keep_leases(self) -> None:
        """Renew while scoring takes longer than a lease."""
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            with contextlib.suppress(StreamsError):  # the next round tries again; a lost lease costs a second scoring
                await self._samples.renew(list(self._tasks))
