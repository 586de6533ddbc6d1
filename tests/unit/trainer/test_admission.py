"""The control law of admission, by simulation: the bound holds, nothing hangs, generation never idles for nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.admission import Law, Observation, admit, due


class TestNumbers:
    def test_strictly_on_policy(self) -> None:
        """One step's groups, and none while it trains: they would be a version old when taken."""
        law = Law(groups_per_step=4, max_staleness=0)
        assert admit(law, Observation(version=1, in_flight=0, steps_left=9)) == 4
        assert admit(law, Observation(version=1, in_flight=3, steps_left=9)) == 1
        assert admit(law, Observation(version=1, in_flight=0, steps_left=9, training=True)) == 0

    def test_one_step_off(self) -> None:
        """The next step's groups are generated while this one trains."""
        law = Law(groups_per_step=4, max_staleness=1)
        assert admit(law, Observation(version=1, in_flight=0, steps_left=9)) == 8
        assert admit(law, Observation(version=1, in_flight=4, steps_left=8, training=True)) == 0
        assert admit(law, Observation(version=2, in_flight=4, steps_left=8)) == 4

    def test_nothing_is_generated_for_nobody(self) -> None:
        law = Law(groups_per_step=4, max_staleness=3)
        assert admit(law, Observation(version=9, in_flight=4, steps_left=1)) == 0
        assert admit(law, Observation(version=9, in_flight=0, steps_left=0, training=True)) == 0

    def test_never_negative(self) -> None:
        assert admit(Law(2, 0), Observation(version=1, in_flight=7, steps_left=5)) == 0

    def test_a_step_waits_for_what_only_it_can_take(self) -> None:
        """S = 1, G = 2: at version 2 those of version 1 must go now; those of version 2 have one more step."""
        law = Law(groups_per_step=2, max_staleness=1)
        assert due(law, 2, [1, 1, 2, 2]) == 2
        assert due(law, 2, [1, 2, 2]) == 1
        assert due(law, 2, [2, 2]) == 0
        assert due(law, 1, [1, 1, 1, 1]) == 2
        assert due(law, 1, []) == 0

    @pytest.mark.parametrize(("groups", "staleness"), [(0, 1), (1, -1)])
    def test_impossible_laws_are_refused(self, groups: int, staleness: int) -> None:
        with pytest.raises(ValueError, match="must"):
            Law(groups, staleness)


@dataclass
class Simulation:
    """A trainer and rollout servers on one clock. Every group needs its own time to generate, and steps take
    `step_time`; a group is lost with its place given up when `lost` says so. Tokens are as old as the admission."""

    law: Law
    steps: int
    durations: list[int]
    lost: list[bool]
    step_time: int
    clock: int = 0
    version: int = 1
    started: int = 0
    in_flight: list[tuple[int, int, bool]] = field(default_factory=list)  # (admitted version, done at, lost)
    ages: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)

    def admit(self, training: bool) -> None:
        left = self.steps - len(self.waits)
        count = admit(self.law, Observation(self.version, len(self.in_flight), left, training))
        for _ in range(count):
            serial = self.started
            self.started += 1
            duration = self.durations[serial % len(self.durations)]
            lost = serial < 500 and self.lost[serial % len(self.lost)]
            self.in_flight.append((self.version, self.clock + duration, lost))

    def give_up_lost(self) -> None:
        self.in_flight = [one for one in self.in_flight if not (one[2] and one[1] <= self.clock)]

    def choose(self) -> list[tuple[int, int, bool]] | None:
        """As the collector does: those that are due, then by completion."""
        must = self.in_flight[: due(self.law, self.version, [one[0] for one in self.in_flight])]
        done = sorted((one for one in self.in_flight if one[1] <= self.clock and not one[2]), key=lambda one: one[1])
        if any(one not in done for one in must):
            return None
        chosen = must + [one for one in done if one not in must]
        return chosen[: self.law.groups_per_step] if len(chosen) >= self.law.groups_per_step else None

    def step(self) -> None:
        began = self.clock
        while True:
            self.give_up_lost()
            self.admit(training=False)
            chosen = self.choose()
            if chosen is not None:
                break
            self.clock += 1
            assert self.clock < began + 100_000, "the pipeline hangs"
        for one in chosen:
            self.in_flight.remove(one)
        self.ages += [self.version - one[0] for one in chosen]
        self.waits.append(self.clock - began)
        self.admit(training=True)
        self.clock += self.step_time
        self.version += 1


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 5),
    st.integers(0, 3),
    st.lists(st.integers(0, 15), min_size=1, max_size=11),
    st.lists(st.booleans(), min_size=1, max_size=7),
    st.integers(0, 8),
    st.booleans(),
)
def test_the_bound_is_never_broken_and_every_step_comes(
    groups: int, staleness: int, durations: list[int], lost: list[bool], step_time: int, losses: bool
) -> None:
    run = Simulation(Law(groups, staleness), 12, durations, lost if losses else [False], step_time)
    for _ in range(run.steps):
        run.step()
    assert len(run.ages) == 12 * groups
    assert max(run.ages) <= staleness
    assert not run.in_flight, "generated for nobody"


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 20))
def test_a_trainer_that_is_slower_than_generation_never_waits(groups: int, staleness: int, duration: int) -> None:
    """The pipeline is full: after the first step, its groups are there when the trainer asks."""
    run = Simulation(Law(groups, staleness), 8, [duration], [False], step_time=duration)
    for _ in range(run.steps):
        run.step()
    assert run.waits[1:] == [0] * 7


def test_strictly_on_policy_trains_on_nothing_old() -> None:
    run = Simulation(Law(3, 0), 5, [1, 9, 4], [False], step_time=2)
    for _ in range(run.steps):
        run.step()
    assert set(run.ages) == {0}


def test_slow_groups_are_waited_for_and_not_wasted() -> None:
    """Every group that was admitted is trained on, the slowest included: length does not decide what is learned."""
    run = Simulation(Law(2, 1), 10, [1, 1, 60, 1, 1], [False], step_time=1)
    for _ in range(run.steps):
        run.step()
    assert run.started == len(run.ages) == 20
