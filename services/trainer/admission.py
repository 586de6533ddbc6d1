"""How many groups of prompts may be admitted now. A pure controller: observations in, a number out.

The control law, with G groups to a step and a bound of S versions (0: strictly on-policy, 1: one step off):

- A group is in flight from its admission until a step trains on it or it is given up, complete or not. Groups set
  aside for a step that is still being filled (dynamic sampling) are in flight too: they hold places in it.
- A group admitted under version v holds no token older than v, so it may be taken by the steps that update
  versions v ... v + S: S + 1 steps, or S when one of them is running already. These steps take (that many) * G
  groups. Admitting stops when so many are in flight, for the next one could only be taken too late.
- Up to there everything is admitted at once: generation never idles for a reason other than the bound.
- A run that ends needs no more than its remaining steps take, so that nothing is generated for nobody.
- A group that was dropped, filtered out or lost is no longer in flight, and so its place is refilled by itself.
- No deadlock: between steps at least G may be in flight, which is what the next step waits for.

The law is exact when steps take the oldest groups first. A younger group that overtakes an older, slower one uses up
a place that the older needs. `due` says which groups the next step must therefore wait for: taking any others in
their place would waste them, and a habit of wasting slow groups is a bias against long answers. Consumption
enforces the bound whatever happens here; this module makes that rare. It owns no stream, clock or task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Law:
    """What does not change during a run. Raises ValueError for a step of no groups or a negative bound."""

    groups_per_step: int
    max_staleness: int

    def __post_init__(self) -> None:
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step must be at least 1, got {self.groups_per_step}")
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must not be negative, got {self.max_staleness}")


@dataclass(frozen=True)
class Observation:
    """What is true now.

    version: the newest published weights, under which a group admitted now is sampled.
    in_flight: groups admitted and neither given up nor in a step that has begun; those set aside for one count.
    steps_left: steps that have not begun.
    training: a step has begun and has not published yet.
    """

    version: int
    in_flight: int
    steps_left: int
    training: bool = False


def admit(law: Law, now: Observation) -> int:
    """How many groups to admit now, at least 0."""
    usable_steps = law.max_staleness + (0 if now.training else 1)
    room = min(usable_steps, now.steps_left) * law.groups_per_step
    return max(0, room - now.in_flight)


def due(law: Law, version: int, admitted: Sequence[int]) -> int:
    """How many of the oldest groups in flight the step that updates `version` must be made of.

    admitted: the version under which each group in flight was admitted, oldest first. After the step, what is left
    must still fit into the steps that may take it: at most k * G groups may have only k steps left.
    """
    must = 0
    for index, born in enumerate(admitted):
        steps_after_this = max(0, born + law.max_staleness - version)
        must = max(must, index + 1 - steps_after_this * law.groups_per_step)
    return min(must, law.groups_per_step, len(admitted))
