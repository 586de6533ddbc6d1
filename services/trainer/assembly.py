"""From scored samples, in any order and possibly twice, to complete groups that a step may use.

A group is handed out when all of its members are known, in order of completion, once, and never when one of its
tokens is older than the bound allows. What is dropped is dropped as a whole group and counted. A sample whose
reward is unknown (its scorer or its server failed) completes its group but is not valid: it enters no gradient and no
baseline. Nothing here touches a stream or a disk: the collector acknowledges a sample as soon as it is here, and a
checkpoint carries the prompts of the groups that no step has taken.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from trireme.contracts import samples
from trireme.contracts.v1 import sample_pb2

REMEMBERED = 1 << 16  # finished groups kept to recognise a second delivery; far more than a stream ever holds


class Verdict(Enum):
    """What became of a sample that was added."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # the same sample id again; the first one counts
    LATE = "late"  # its group was handed out or dropped before
    INVALID = "invalid"  # broken; its place in the group is filled by an unusable member


@dataclass(frozen=True)
class Member:
    """One place of a group. sample is None when it was lost or broken; note then says why."""

    index: int
    sample: sample_pb2.Sample | None
    note: str = ""

    @property
    def valid(self) -> bool:
        """May enter gradient and baseline: there is a sample, it was not cut off, and its reward is known."""
        return (
            self.sample is not None
            and self.sample.finish_reason != sample_pb2.FINISH_REASON_ABORTED
            and self.sample.reward.WhichOneof("outcome") in ("score", "policy_failure")
        )


@dataclass
class Group:
    """All samples of one prompt. members: by index, of which `size` make it complete. fate: why it was dropped."""

    id: str
    size: int
    members: dict[int, Member] = field(default_factory=dict)
    fate: str = ""

    @property
    def complete(self) -> bool:
        return len(self.members) == self.size

    @property
    def samples(self) -> list[sample_pb2.Sample]:
        return [member.sample for member in self if member.sample is not None]

    @property
    def oldest_version(self) -> int | None:
        """The version of its oldest token; None when nothing usable came yet."""
        return min((oldest_version(member.sample) for member in self if member.valid and member.sample), default=None)

    @property
    def usable(self) -> int:
        """How many members may enter gradient and baseline."""
        return sum(member.valid for member in self)

    def __iter__(self) -> Iterator[Member]:
        return iter(sorted(self.members.values(), key=lambda member: member.index))

    def __len__(self) -> int:
        return len(self.members)


def _trouble(group: Group) -> str:
    """What befell the first member of a group of which none is valid."""
    member = next(iter(group))
    if member.sample is None:
        return member.note
    return member.sample.reward.infrastructure_failure.reason or "its generation was aborted"


def oldest_version(sample: sample_pb2.Sample) -> int:
    """The smallest weight version under which a response token was sampled; of an empty response, at admission."""
    return min((span.version for span in sample.versions), default=sample.admitted_version)


class Assembler:
    """Collects samples into groups.

    max_staleness: in weight versions. validate: raises ValueError for a sample that must not be trained on.
    remembered: how many ids of finished groups are kept to recognise a second delivery.
    """

    def __init__(
        self,
        max_staleness: int,
        validate: Callable[[sample_pb2.Sample], object] = samples.validate,
        remembered: int = REMEMBERED,
    ) -> None:
        self.max_staleness = max_staleness
        self.counters: Counter[str] = Counter()
        self._validate = validate
        self._groups: OrderedDict[str, Group] = OrderedDict()  # by first arrival
        self._complete: OrderedDict[str, Group] = OrderedDict()  # by completion
        self._finished = _Recent(remembered)
        self._dropped: list[Group] = []

    def add(self, sample: sample_pb2.Sample) -> Verdict:
        """Take one scored sample.

        Raises ValueError for a broken sample that does not even say which place of which group it is.
        """
        known = self._known(sample.group_id, sample.group_index)
        if known is not None:
            return self._counted(known)
        problem = self._problem(sample)
        if problem:
            self.give_up(sample.group_id, sample.group_index, sample.group_size, problem)
            return self._counted(Verdict.INVALID)
        self._place(sample.group_id, sample.group_size, Member(sample.group_index, sample))
        return self._counted(Verdict.ACCEPTED)

    def give_up(self, group_id: str, index: int, size: int, reason: str) -> None:
        """Fill a place with an unusable member, so that the rest of the group can be used.

        Raises ValueError when the place cannot exist.
        """
        expected = self._expected_size(group_id, size)
        if not group_id or not 0 <= index < expected:
            raise ValueError(f"sample {index} of {expected} of group {group_id!r} cannot exist ({reason})")
        if self._known(group_id, index) is None:
            self._place(group_id, expected, Member(index, None, note=reason))
            self.counters["given_up"] += 1

    def ready(self, count: int, version: int, first: Sequence[str] = ()) -> list[Group] | None:
        """`count` groups to update weights `version`: `first`, then those completed first; None while they lack.

        first: ids of groups that are waited for (see `admission.due`); any that were dropped are not. Groups that are
        too old for `version` or without a usable member are dropped before all else.
        """
        self.expire(version)
        wanted = [one for one in first if one not in self._finished][:count]
        if len(self._complete) < count or any(one not in self._complete for one in wanted):
            return None
        others = [one for one in self._complete if one not in wanted]
        chosen = [self._complete.pop(one) for one in (wanted + others)[:count]]
        for group in chosen:
            self._finished.add(group.id)
        self.counters["consumed_groups"] += len(chosen)
        return chosen

    def expire(self, version: int) -> None:
        """Drop every group, complete or not, with a token older than `version - max_staleness`."""
        for group in self.waiting:
            oldest = group.oldest_version
            if oldest is not None and version - oldest > self.max_staleness:
                self._drop(
                    group, "stale", f"stale (sampled by version {oldest} for version {version}; see rollout logs)"
                )
            elif group.complete and not group.usable:
                self._drop(group, "unusable", f"unusable ({_trouble(group)}; see rollout and reward logs)")

    def take_dropped(self) -> list[Group]:
        """The groups dropped since the last call, for the caller to forget and to replace."""
        dropped, self._dropped = self._dropped, []
        return dropped

    @property
    def waiting(self) -> list[Group]:
        """Groups held, complete or not: those complete first, in order of completion."""
        return [*self._complete.values(), *self._groups.values()]

    def _known(self, group_id: str, index: int) -> Verdict | None:
        if group_id in self._finished:
            return Verdict.LATE
        group = self._find(group_id)
        return Verdict.DUPLICATE if group is not None and index in group.members else None

    def _find(self, group_id: str) -> Group | None:
        return self._groups.get(group_id) or self._complete.get(group_id)

    def _expected_size(self, group_id: str, claimed: int) -> int:
        group = self._find(group_id)
        return claimed if group is None else group.size

    def _problem(self, sample: sample_pb2.Sample) -> str:
        """Why this sample must not be trained on, "" if it may."""
        group = self._find(sample.group_id)
        if group is not None and group.size != sample.group_size:
            return f"group_size {sample.group_size} where its group has {group.size}"
        if group is not None and any(other.prompt_token_ids != sample.prompt_token_ids for other in group.samples[:1]):
            return "its prompt tokens differ from those of its group"
        try:
            self._validate(sample)
        except ValueError as error:
            return str(error)
        return ""

    def _place(self, group_id: str, size: int, member: Member) -> None:
        group = self._groups.setdefault(group_id, Group(group_id, size))
        group.members[member.index] = member
        if group.complete:
            self._complete[group_id] = self._groups.pop(group_id)

    def _drop(self, group: Group, why: str, fate: str) -> None:
        group.fate = fate
        self._groups.pop(group.id, None)
        self._complete.pop(group.id, None)
        self._finished.add(group.id)
        self._dropped.append(group)
        self.counters[f"{why}_groups"] += 1

    def _counted(self, verdict: Verdict) -> Verdict:
        self.counters[f"{verdict.value}_samples"] += 1
        return verdict


class _Recent:
    """The last `limit` ids that were added."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ids: OrderedDict[str, None] = OrderedDict()

    def add(self, one: str) -> None:
        self._ids[one] = None
        self._ids.move_to_end(one)
        while len(self._ids) > self._limit:
            self._ids.popitem(last=False)

    def __contains__(self, one: str) -> bool:
        return one in self._ids
