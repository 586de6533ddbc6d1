"""Assembly: every group whole, once, and never too old."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.assembly import Assembler, Group, Verdict, oldest_version
from tests.unit.trainer.builders import sample
from trireme.contracts import rewards
from trireme.contracts.v1 import sample_pb2


def filled(*groups: str, staleness: int = 0, **fields: Any) -> Assembler:
    """An assembler holding complete groups of two."""
    assembler = Assembler(staleness)
    for name in groups:
        for index in range(2):
            assert assembler.add(sample(name, index, **fields)) is Verdict.ACCEPTED
    return assembler


def names(groups: list[Group] | None) -> list[str] | None:
    return None if groups is None else [group.id for group in groups]


class TestGroups:
    def test_come_out_in_the_order_of_completion(self) -> None:
        assembler = Assembler(0)
        for name, index in [("a", 0), ("b", 1), ("b", 0), ("a", 1)]:
            assembler.add(sample(name, index))
        assert names(assembler.ready(2, 1)) == ["b", "a"]

    def test_members_come_out_by_index(self) -> None:
        assembler = Assembler(0)
        for index in (2, 0, 1):
            assembler.add(sample(index=index, size=3))
        (group,) = assembler.ready(1, 1) or []
        assert [member.index for member in group] == [0, 1, 2]

    def test_wait_for_every_member(self) -> None:
        """Q-12: all n members or none."""
        assembler = Assembler(0)
        assembler.add(sample(index=0))
        assert assembler.ready(1, 1) is None
        assembler.add(sample(index=1))
        assert names(assembler.ready(1, 1)) == ["g"]

    def test_come_out_once(self) -> None:
        assembler = filled("a", "b")
        assert names(assembler.ready(1, 1)) == ["a"]
        assert assembler.ready(2, 1) is None
        assert names(assembler.ready(1, 1)) == ["b"]

    def test_those_waited_for_come_first(self) -> None:
        assembler = filled("a", "b", "c")
        assert assembler.ready(2, 1, first=["slow"]) is None
        assert names(assembler.ready(2, 1, first=["c"])) == ["c", "a"]

    def test_those_dropped_are_not_waited_for(self) -> None:
        assembler = filled("old", version=1, staleness=1)
        for index in range(2):
            assembler.add(sample("new", index, version=3))
        assert names(assembler.ready(1, 3, first=["old"])) == ["new"]


class TestDuplicates:
    def test_the_first_delivery_counts(self) -> None:
        """Q-08: at-least-once delivery hands a sample over twice."""
        assembler = Assembler(0)
        assembler.add(sample(index=0, score=0.25))
        assert assembler.add(sample(index=0, score=0.75)) is Verdict.DUPLICATE
        assembler.add(sample(index=1))
        (group,) = assembler.ready(1, 1) or []
        assert group.samples[0].reward.score.value == 0.25
        assert assembler.counters["duplicate_samples"] == 1

    def test_a_finished_group_takes_no_more(self) -> None:
        assembler = filled("a")
        assembler.ready(1, 1)
        assert assembler.add(sample("a", 0)) is Verdict.LATE
        assert assembler.waiting == []

    def test_the_memory_is_bounded(self) -> None:
        assembler = Assembler(0, remembered=10)
        for number in range(200):
            for index in range(2):
                assembler.add(sample(f"g{number}", index))
            assembler.ready(1, 1)
        assert assembler.add(sample("g190", 0)) is Verdict.LATE
        assert assembler.add(sample("g189", 0)) is Verdict.ACCEPTED


class TestStaleness:
    def test_the_oldest_token_decides(self) -> None:
        """P-17: a sample whose weights changed under way is as old as its first token."""
        spans = [sample_pb2.VersionSpan(length=1, version=4), sample_pb2.VersionSpan(start=1, length=1, version=6)]
        assert oldest_version(sample(versions=spans)) == 4
        assert oldest_version(sample(response=(), version=5)) == 5

    @pytest.mark.parametrize(("version", "usable"), [(4, True), (5, True), (6, False)])
    def test_a_group_is_dropped_beyond_the_bound(self, version: int, usable: bool) -> None:
        assembler = filled("a", version=4, staleness=1)
        assert (assembler.ready(1, version) is not None) == usable
        assert names(assembler.take_dropped()) == ([] if usable else ["a"])
        assert assembler.counters["stale_groups"] == (0 if usable else 1)

    def test_an_incomplete_group_is_dropped_too_and_takes_no_latecomers(self) -> None:
        assembler = Assembler(0)
        assembler.add(sample(index=0, version=1))
        assembler.expire(2)
        assert [group.id for group in assembler.take_dropped()] == ["g"]
        assert assembler.take_dropped() == []
        assert assembler.add(sample(index=1, version=2)) is Verdict.LATE


class TestFailures:
    def test_an_infrastructure_failure_is_not_a_zero(self) -> None:
        """R-28: it completes the group and is not valid."""
        assembler = Assembler(0)
        assembler.add(sample(index=0, score=None))
        assembler.add(sample(index=1, score=0.0))
        (group,) = assembler.ready(1, 1) or []
        assert [member.valid for member in group] == [False, True]
        assert group.usable == 1

    def test_a_policy_failure_is_valid(self) -> None:
        assembler = Assembler(0)
        assembler.add(sample(index=0, size=1, reward=rewards.policy_failure("malformed", verifier="t")))
        (group,) = assembler.ready(1, 1) or []
        assert group.usable == 1

    def test_a_response_that_was_cut_off_is_not_valid(self) -> None:
        assembler = Assembler(0)
        assembler.add(sample(index=0, finish_reason=sample_pb2.FINISH_REASON_ABORTED))
        assembler.add(sample(index=1))
        (group,) = assembler.ready(1, 1) or []
        assert [member.valid for member in group] == [False, True]

    def test_a_group_without_a_usable_member_is_dropped(self) -> None:
        assembler = filled("a", score=None)
        assert assembler.ready(1, 1) is None
        assert assembler.counters["unusable_groups"] == 1
        assert [group.id for group in assembler.take_dropped()] == ["a"]

    @pytest.mark.parametrize(
        "broken",
        [
            {"log_probs": [-1.0]},
            {"log_probs": [-1.0, float("nan")]},
            {"size": 3},
            {"prompt": (5, 6, 8)},
            {"versions": []},
            {"score": float("inf"), "response": (21, 22)},
        ],
    )
    def test_a_broken_sample_leaves_an_unusable_place(self, broken: dict[str, Any]) -> None:
        """P-13: nan log-probs are rejected; the rest of the group can still be used."""
        assembler = Assembler(0)
        assembler.add(sample(index=1))
        if "score" in broken:
            broken = {"reward": sample_pb2.Reward(score=sample_pb2.Score(value=broken["score"]))}
        assert assembler.add(sample(index=0, **broken)) is Verdict.INVALID
        (group,) = assembler.ready(1, 1) or []
        assert [member.valid for member in group] == [False, True]
        assert group.members[0].note

    def test_a_sample_of_no_place_is_refused(self) -> None:
        with pytest.raises(ValueError, match="sample 5 of 2 of group 'g' cannot exist"):
            Assembler(0).add(sample(index=5))

    def test_a_place_can_be_given_up(self) -> None:
        assembler = Assembler(0)
        assembler.add(sample(index=0))
        assembler.give_up("g", 1, 2, "delivered 4 times")
        (group,) = assembler.ready(1, 1) or []
        assert len(group.samples) == 1
        assert assembler.counters["given_up"] == 1


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=40))
def test_every_group_comes_out_once_whatever_the_order(arrivals: list[tuple[int, int]]) -> None:
    """Q-08, Q-12: random order, doubled deliveries."""
    assembler, taken = Assembler(0), []
    for group, index in [*arrivals, *((g, i) for g in range(6) for i in range(3))]:
        assembler.add(sample(f"g{group}", index, size=3))
        taken += names(assembler.ready(1, 1)) or []
    assert sorted(taken) == [f"g{n}" for n in range(6)]
    assert assembler.counters["consumed_groups"] == 6
