"""From raw scores to the rewards that advantages are made of, and which samples may carry gradient.

The order is scaling, then the overlong penalty. Filters that look at how informative a group is take the RAW
scores: a shaped reward differs by length even where every answer is equally right.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from services.trainer.advantages import Bools, Floats, zero_variance
from trireme.config.blocks.grpo import GrpoConfig


def transform(rewards: ArrayLike, response_lengths: ArrayLike, options: GrpoConfig) -> Floats:
    """float64 [N]: raw scores scaled and shaped as the `grpo` block asks; unchanged where both are off.

    response_lengths: int [N], all tokens of the response, over every turn.
    """
    values = np.asarray(rewards, np.float64).copy()
    scaling, shaping = options.reward_scaling, options.reward_shaping
    if scaling.enabled:
        values = scale(values, (scaling.source_min, scaling.source_max), (scaling.target_min, scaling.target_max))
    if shaping.enabled:
        values = values + overlong_penalty(
            response_lengths,
            limit=shaping.max_response_length,
            buffer=shaping.overlong_buffer_length,
            penalty=shaping.overlong_buffer_penalty,
        )
    return values


def scale(rewards: ArrayLike, source: tuple[float, float], target: tuple[float, float]) -> Floats:
    """float64 [N]: clamped to the source interval, then mapped linearly so that its ends become the target's.

    Raises ValueError when the source interval is empty.
    """
    low, high = source
    if not low < high:
        raise ValueError(f"grpo.reward_scaling: source_min {low} must be below source_max {high}")
    share = (np.clip(np.asarray(rewards, np.float64), low, high) - low) / (high - low)
    return target[0] + share * (target[1] - target[0])


def overlong_penalty(lengths: ArrayLike, *, limit: int, buffer: int, penalty: float) -> Floats:
    """float64 [N] in [-penalty, 0]: 0 up to `limit - buffer` tokens, then falling linearly to -penalty at `limit`.

    Raises ValueError for a buffer that is not within the limit.
    """
    if not 0 < buffer <= limit:
        raise ValueError(
            f"grpo.reward_shaping.overlong_buffer_length {buffer} must be within 1 and max_response_length {limit}"
        )
    excess = np.asarray(lengths, np.float64) - (limit - buffer)
    return -np.clip(excess / buffer, 0.0, 1.0) * penalty


def trainable(valid: ArrayLike, truncated: ArrayLike, *, overlong_filtering: bool) -> Bools:
    """bool [N]: may enter the loss. With overlong filtering a truncated sample may not, though it stays in the
    baseline of its group, which is made with `valid` alone."""
    keep = np.asarray(valid, bool)
    return keep & ~np.asarray(truncated, bool) if overlong_filtering else keep.copy()


def informative(raw_rewards: ArrayLike, groups: ArrayLike, valid: ArrayLike) -> Bools:
    """bool [N]: the sample's group has valid samples of different RAW reward (dynamic sampling keeps only these)."""
    return ~zero_variance(raw_rewards, groups, valid)
