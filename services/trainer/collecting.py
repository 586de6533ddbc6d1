"""Collecting a step's groups: admit prompts as far as the staleness bound allows, take what comes back scored.

What the trainer knows of a group in flight is its prompt. A checkpoint carries these prompts, and they are put into
the stream again on resume: the checkpoint is the truth, and what the streams hold of an earlier life is cleared.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from services.trainer.admission import Law, Observation, admit, due
from services.trainer.assembly import Assembler, Group
from services.trainer.batching import flatten
from services.trainer.data.sampler import PreparedPrompt
from services.trainer.prompts import training_prompt
from services.trainer.rewards import informative
from trireme.config import Config
from trireme.contracts.v1 import sample_pb2
from trireme.streams.base import Entry, Stream

log = logging.getLogger(__name__)

TAKE = 256  # scored samples handled at once
POLL_S = 0.5


class StarvedError(Exception):
    """No scored sample arrived for too long; the message says where the pipeline stands."""


class DataExhausted(Exception):
    """The epochs are used up: too few prompts are left for another step."""


class PromptSource(Protocol):
    """Where prompts come from; `services.trainer.data.sampler.PromptSampler`."""

    def next(self, count: int) -> list[PreparedPrompt]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Collector:
    """Keeps the pipeline full and hands out complete groups.

    prompts, scored: the streams. steps_left: asked whenever prompts are admitted.
    """

    def __init__(
        self, config: Config, source: PromptSource, prompts: Stream, scored: Stream, steps_left: Callable[[], int]
    ) -> None:
        self.assembler = Assembler(config.staleness.max_versions)
        self.pending: OrderedDict[str, sample_pb2.Prompt] = OrderedDict()  # groups in flight, by admission
        self._config, self._source, self._steps_left = config, source, steps_left
        self._prompts, self._scored = prompts, scored
        self._law = Law(config.grpo.num_prompts_per_step, config.staleness.max_versions)
        self._serial = 0
        self._exhausted = False

    async def admit(self, version: int, *, training: bool = False) -> int:
        """Put as many prompts into the stream as may be used in time; how many."""
        now = Observation(version, len(self.pending), self._steps_left(), training)
        count = admit(self._law, now)
        dealt = self._source.next(count) if count else []
        self._exhausted = len(dealt) < count
        for prepared in dealt:
            prompt = training_prompt(self._config, prepared, serial=self._serial, version=version)
            self._serial += 1
            self.pending[prompt.group_id] = prompt
            await self._prompts.put(prompt.SerializeToString())
        return len(dealt)

    async def collect(self, version: int) -> list[Group]:
        """The groups of the step that updates weights `version`, admitting as needed.

        With dynamic sampling, groups whose raw rewards are all equal are replaced a bounded number of times.
        Raises StarvedError when nothing arrives for `trainer.refill_timeout_s`, DataExhausted at the end of the data.
        """
        chosen: list[Group] = []
        generated = 0
        while (missing := self._law.groups_per_step - len(chosen)) > 0:
            groups = await self._next_groups(missing, version)
            generated += len(groups)
            chosen += self._informative(groups) if self._may_replace(generated) else groups
        return chosen

    def _may_replace(self, generated: int) -> bool:
        grpo = self._config.grpo
        limit = grpo.dynamic_sampling_max_gen_batches * grpo.num_prompts_per_step
        return grpo.use_dynamic_sampling and generated < limit

    def _informative(self, groups: Sequence[Group]) -> list[Group]:
        flat = flatten(groups, self._config.reward.policy_failure_score)
        keep = informative(flat.rewards, flat.groups, flat.valid)
        return [group for number, group in enumerate(groups) if keep[flat.groups == number].any()]

    async def _next_groups(self, count: int, version: int) -> list[Group]:
        heard = time.monotonic()
        while True:
            await self.admit(version)
            groups = self._ready(count, version)
            if groups is not None:
                return groups
            if self._exhausted and len(self.pending) < count:
                raise DataExhausted(f"{len(self.pending)} prompts are left, a step needs {count} more")
            entries = await self._scored.take(TAKE, POLL_S)
            await self._add(entries)
            self._forget_dropped(version)
            heard = time.monotonic() if entries else heard
            if time.monotonic() - heard > self._config.trainer.refill_timeout_s:
                raise StarvedError(await self._where_it_hangs())

    def _ready(self, count: int, version: int) -> list[Group] | None:
        admitted = [prompt.admitted_version for prompt in self.pending.values()]
        first = list(self.pending)[: due(self._law, version, admitted)]
        groups = self.assembler.ready(count, version, first=first)
        for group in groups or []:
            self.pending.pop(group.id, None)
        return groups

    async def _add(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            try:
                self.assembler.add(sample_pb2.Sample.FromString(entry.data), entry.id)
            except ValueError as error:  # ContractError and protobuf's DecodeError are ValueErrors
                await self._scored.dead_letter(entry, str(error))
        # From here on the assembler holds them, and a checkpoint holds their prompts.
        await self._scored.done([entry.id for entry in entries])

    def _forget_dropped(self, version: int) -> None:
        self.assembler.expire(version)
        for group in self.assembler.take_dropped():
            log.warning("group dropped", extra={"group": group.id, "oldest": group.oldest_version, "version": version})
            self.pending.pop(group.id, None)

    async def _where_it_hangs(self) -> str:
        return (
            f"no scored sample for {self._config.trainer.refill_timeout_s:g} s (trainer.refill_timeout_s):"
            f" {len(self.pending)} groups in flight, {await self._prompts.depth()} prompts and"
            f" {await self._scored.depth()} scored samples in Redis; see logs/rollout-*.log and logs/reward-*.log"
        )

    def state(self) -> dict[str, Any]:
        """For a checkpoint: position in the data and the prompts of groups that no step has taken."""
        return {
            "serial": self._serial,
            "source": self._source.state(),
            "pending": [base64.b64encode(p.SerializeToString()).decode() for p in self.pending.values()],
        }

    async def restore(self, state: dict[str, Any], version: int) -> None:
        """Inverse of `state`: admits the pending prompts again, to be sampled under `version` or newer."""
        self._serial = state["serial"]
        self._source.restore(state["source"])
        for encoded in state["pending"]:
            prompt = sample_pb2.Prompt.FromString(base64.b64decode(encoded))
            prompt.admitted_version = prompt.min_weight_version = version
            self.pending[prompt.group_id] = prompt
            await self._prompts.put(prompt.SerializeToString())


async def clear(*streams: Stream) -> int:
    """Remove what an earlier life of the run left waiting; how many entries."""
    removed = 0
    for stream in streams:
        while entries := await stream.take(TAKE, 0.01):
            await stream.done([entry.id for entry in entries])
            removed += len(entries)
            await asyncio.sleep(0)
    return removed
