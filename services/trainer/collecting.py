"""Collecting a step's groups: admit prompts as far as the staleness bound allows, take what comes back scored.

What the trainer knows of a group in flight is its prompt. A checkpoint carries these prompts, and they are put into
the stream again on resume: the checkpoint is the truth, and what the streams hold of an earlier life is cleared.
"""

from __future__ import annotations

import base64
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from services.trainer.admission import Law, Observation, admit, due
from services.trainer.assembly import Assembler, Group, Verdict
from services.trainer.batching import flatten
from services.trainer.data.sampler import PreparedPrompt
from services.trainer.prompts import training_prompt
from services.trainer.rewards import informative
from trireme.config import Config
from trireme.contracts.v1 import sample_pb2
from trireme.streams.base import DeadLetter, Entry
from trireme.streams.redis import RedisStreams

log = logging.getLogger(__name__)

TAKE = 256  # scored samples handled at once
POLL_S = 0.5
MOST_DROPPED = 20  # steps' worth of groups dropped for one step, after which something is broken


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

    steps_left: asked whenever prompts are admitted.
    """

    def __init__(
        self, config: Config, source: PromptSource, streams: RedisStreams, steps_left: Callable[[], int]
    ) -> None:
        self.assembler = Assembler(config.staleness.max_versions)
        self.pending: OrderedDict[str, sample_pb2.Prompt] = OrderedDict()  # groups in flight, by admission
        self._config, self._source, self._steps_left = config, source, steps_left
        self._prompts, self._scored, self._dead = streams.prompts, streams.scored, streams.dead
        self._dead_until: str | None = None  # dead letters read so far; those of an earlier life are not ours
        self._law = Law(config.grpo.num_prompts_per_step, config.staleness.max_versions)
        # Chosen by the `collect` under way. Until it returns they are in flight, and a checkpoint keeps their prompts.
        self._chosen: dict[str, Group] = {}
        self._serial = 0
        self._exhausted = False

    async def admit(self, version: int, *, training: bool = False) -> int:
        """Put as many prompts into the stream as may be used in time; how many.

        They are pending before the first is put: whoever is cancelled in between loses none of them.
        """
        steps_left = self._steps_left() - (1 if training else 0)
        now = Observation(version, len(self.pending), steps_left, training)
        count = admit(self._law, now)
        dealt = self._source.next(count) if count else []
        self._exhausted = len(dealt) < count
        prompts = [
            training_prompt(self._config, prepared, serial=self._serial + number, version=version)
            for number, prepared in enumerate(dealt)
        ]
        self._serial += len(prompts)
        await self._put(prompts)
        return len(prompts)

    async def _put(self, prompts: Sequence[sample_pb2.Prompt]) -> None:
        self.pending |= {prompt.group_id: prompt for prompt in prompts}
        if self._dead_until is None:
            self._dead_until = await self._dead.newest()
        for prompt in prompts:
            await self._prompts.put(prompt.SerializeToString())

    async def collect(self, version: int) -> list[Group]:
        """The groups of the step that updates weights `version`, admitting as needed.

        With dynamic sampling, groups whose raw rewards are all equal are replaced a bounded number of times.
        Raises StarvedError when nothing arrives for `trainer.refill_timeout_s`, DataExhausted at the end of the data.
        """
        self._chosen.clear()
        generated = 0
        while (missing := self._law.groups_per_step - len(self._chosen)) > 0:
            groups = await self._next_groups(missing, version)
            generated += len(groups)
            kept = self._informative(groups) if self._may_replace(generated) else groups
            self._chosen |= {group.id: group for group in kept}
            self._forget(group.id for group in groups if group.id not in self._chosen)
        self._forget(self._chosen)
        return list(self._chosen.values())

    def _forget(self, group_ids: Iterable[str]) -> None:
        """No longer in flight: a step has taken these groups, or none ever will."""
        for group_id in group_ids:
            self.pending.pop(group_id, None)

    def _may_replace(self, generated: int) -> bool:
        grpo = self._config.grpo
        limit = grpo.dynamic_sampling_max_gen_batches * grpo.num_prompts_per_step
        return grpo.use_dynamic_sampling and generated < limit

    def _informative(self, groups: Sequence[Group]) -> list[Group]:
        flat = flatten(groups, self._config.reward.policy_failure_score)
        keep = informative(flat.rewards, flat.groups, flat.valid)
        return [group for number, group in enumerate(groups) if keep[flat.groups == number].any()]

    async def _next_groups(self, count: int, version: int) -> list[Group]:
        heard, dropped, why = time.monotonic(), 0, ""
        while True:
            await self.admit(version)
            groups = self._ready(count, version)
            if groups is not None:
                return groups
            left = len(self.pending) - len(self._chosen)
            if self._exhausted and left < count:
                raise DataExhausted(f"{left} prompts are left, a step needs {count} more")
            entries = await self._scored.take(TAKE, POLL_S)
            await self._add(entries)
            await self._give_up_dead()
            for group in self._drop_unusable(version):
                dropped, why = dropped + 1, group.fate
            if dropped > MOST_DROPPED * self._law.groups_per_step:
                raise StarvedError(f"{dropped} groups in a row could not be used, the last one because it was {why}")
            heard = time.monotonic() if entries else heard
            if time.monotonic() - heard > self._config.trainer.refill_timeout_s:
                raise StarvedError(await self._where_it_hangs())

    def _ready(self, count: int, version: int) -> list[Group] | None:
        waiting = {name: p.admitted_version for name, p in self.pending.items() if name not in self._chosen}
        first = list(waiting)[: due(self._law, version, list(waiting.values()))]
        return self.assembler.ready(count, version, first=first)

    async def _add(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            try:
                problem = self._add_one(sample_pb2.Sample.FromString(entry.data))
            except (ValueError, DecodeError) as error:
                problem = str(error)
            if problem:
                await self._scored.dead_letter(entry, problem)
        # From here on the assembler holds them, and a checkpoint holds their prompts.
        await self._scored.done([entry.id for entry in entries])

    def _add_one(self, sample: sample_pb2.Sample) -> str:
        """Why the sample must not be trained on, "" if it may (or is a duplicate, which needs no record)."""
        if self.assembler.add(sample) is not Verdict.INVALID:
            return ""
        groups = (group for group in self.assembler.waiting if group.id == sample.group_id)
        return next((group.members[sample.group_index].note for group in groups), "its group was dropped")

    async def _give_up_dead(self) -> None:
        """What another service gave up on will not come: its place in the group is filled with an unusable member."""
        for letter in await self._dead.read(self._dead_until or "0-0"):
            self._dead_until = letter.id
            with suppress(DecodeError, ValueError):  # garbage that names no possible place holds nobody up
                for group_id, index, size in _places(letter):
                    if group_id in self.pending:
                        self.assembler.give_up(group_id, index, size, letter.reason)

    def _drop_unusable(self, version: int) -> list[Group]:
        self.assembler.expire(version)
        dropped = self.assembler.take_dropped()
        self._forget(group.id for group in dropped)
        for group in dropped:
            log.warning("group dropped", extra={"group": group.id, "reason": group.fate, "version": version})
        return dropped

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
        prompts = [sample_pb2.Prompt.FromString(base64.b64decode(encoded)) for encoded in state["pending"]]
        for prompt in prompts:
            prompt.admitted_version = prompt.min_weight_version = version
        await self._put(prompts)


def _places(letter: DeadLetter) -> list[tuple[str, int, int]]:
    """(group id, index, group size) of every sample that a dead letter stood for."""
    if letter.source == "prompts":
        prompt = sample_pb2.Prompt.FromString(letter.data)
        return [(prompt.group_id, index, prompt.num_samples) for index in range(prompt.num_samples)]
    sample = sample_pb2.Sample.FromString(letter.data)
    return [(sample.group_id, sample.group_index, sample.group_size)]
