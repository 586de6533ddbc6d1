"""Advantages from rewards: one number per sample, in float64, over explicit groups.

Samples that are not valid (their reward is unknown) enter neither a mean nor a deviation and get 0. A set whose
rewards are all equal is recognised by comparing its maximum with its minimum: a deviation computed in floating
point is rarely exactly 0, and dividing by what is left of it invents a signal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trireme.config.blocks.grpo import GrpoConfig

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
EPSILON = 1e-6  # added to a deviation before dividing by it


@dataclass(frozen=True)
class AdvantageStatistics:
    """Over one batch. Fractions are of groups with a valid sample; reward and advantage are over valid samples."""

    groups: int
    zero_variance_fraction: float
    valid_fraction: float
    reward_mean: float
    reward_std: float
    advantage_mean: float
    advantage_min: float
    advantage_max: float


def compute_advantages(rewards: ArrayLike, groups: ArrayLike, valid: ArrayLike, options: GrpoConfig) -> Floats:
    """float64 [N]: the `grpo` advantage of each sample, as the `grpo` configuration block asks.

    rewards: [N]. groups: [N] ids, equal within a group, in any order. valid: bool [N].
    Raises ValueError for shapes that differ or a valid reward that is not finite.
    """
    return grpo(
        rewards,
        groups,
        valid,
        normalize=options.normalize_rewards,
        leave_one_out=options.use_leave_one_out_baseline,
    )


def grpo(
    rewards: ArrayLike, groups: ArrayLike, valid: ArrayLike, *, normalize: bool = True, leave_one_out: bool = True
) -> Floats:
    """float64 [N]: (reward - baseline) / (deviation + 1e-6) within each group.

    With `leave_one_out`, baseline and unbiased deviation are those of the other valid samples, else of the whole
    group. Where these are all equal the difference is left unnormalised. A group of one valid sample gets 0.
    """
    values, keep = _checked(rewards, groups, valid)
    result = np.zeros_like(values)
    for members in _members(groups, keep):
        if len(members) > 1:
            result[members] = _within_group(values[members], normalize, leave_one_out)
    return result


def zero_variance(rewards: ArrayLike, groups: ArrayLike, valid: ArrayLike) -> Bools:
    """bool [N]: the sample's group has no two valid samples of different reward, so that it teaches nothing."""
    values, keep = _checked(rewards, groups, valid)
    flat = np.ones(len(values), bool)
    group_ids = np.asarray(groups)
    for members in _members(groups, keep):
        if not _all_equal(values[members]):
            flat[group_ids == group_ids[members[0]]] = False
    return flat


def statistics(rewards: ArrayLike, groups: ArrayLike, valid: ArrayLike, advantages: ArrayLike) -> AdvantageStatistics:
    """What to report about a batch of advantages. All zero when no sample is valid."""
    values, keep = _checked(rewards, groups, valid)
    sets = [values[members] for members in _members(groups, keep)]
    kept, gains = values[keep], np.asarray(advantages, np.float64)[keep]
    if not sets:
        return AdvantageStatistics(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return AdvantageStatistics(
        groups=len(sets),
        zero_variance_fraction=float(np.mean([_all_equal(one) for one in sets])),
        valid_fraction=float(keep.mean()),
        reward_mean=float(kept.mean()),
        reward_std=float(kept.std()),
        advantage_mean=float(gains.mean()),
        advantage_min=float(gains.min()),
        advantage_max=float(gains.max()),
    )


def _within_group(values: Floats, normalize: bool, leave_one_out: bool) -> Floats:
    """[n] -> [n], n > 1. Row i of `sets` holds the rewards that sample i is compared with."""
    count = len(values)
    if leave_one_out:
        others = ~np.eye(count, dtype=bool)
        sets = np.broadcast_to(values, (count, count))[others].reshape(count, count - 1)
    else:
        sets = np.broadcast_to(values, (count, count))
    equal = sets.max(axis=1) == sets.min(axis=1)
    difference = values - np.where(equal, sets[:, 0], sets.mean(axis=1))
    if not normalize:
        return difference
    deviation = sets.std(axis=1, ddof=1) if sets.shape[1] > 1 else np.zeros(count)
    return np.where(equal, difference, difference / (deviation + EPSILON))


def _all_equal(values: Floats) -> bool:
    return bool(values.max() == values.min())


def _checked(rewards: ArrayLike, groups: ArrayLike, valid: ArrayLike) -> tuple[Floats, Bools]:
    values, keep = np.asarray(rewards, np.float64), np.asarray(valid, bool)
    if values.ndim != 1 or values.shape != keep.shape or values.shape != np.shape(groups):
        raise ValueError(
            f"rewards, groups and valid must be one-dimensional and of one length, "
            f"got shapes {values.shape}, {np.shape(groups)} and {keep.shape}"
        )
    bad = np.flatnonzero(keep & ~np.isfinite(values))
    if len(bad):
        raise ValueError(f"reward of sample {bad[0]} is {values[bad[0]]}: mark the sample as not valid")
    return values, keep


def _members(groups: ArrayLike, keep: Bools) -> Iterator[NDArray[np.intp]]:
    """The indices of the valid samples of each group that has any."""
    ids = np.asarray(groups)
    _, inverse = np.unique(ids, return_inverse=True)
    chosen = np.flatnonzero(keep)
    order = chosen[np.argsort(inverse[chosen], kind="stable")]
    edges = np.flatnonzero(np.diff(inverse[order])) + 1
    if len(order):
        yield from np.split(order, edges)
