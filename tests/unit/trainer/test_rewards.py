"""Reward transforms and the filters of a batch."""

from __future__ import annotations

import pytest

from services.trainer.advantages import grpo
from services.trainer.rewards import informative, overlong_penalty, scale, trainable, transform
from tests.unit.trainer.builders import grpo_config
from trireme.config.blocks.grpo import RewardScalingConfig, RewardShapingConfig


def test_scaling_maps_linearly_and_clamps() -> None:
    got = scale([-9, -1, 0, 1, 5], (-1, 1), (0, 10))
    assert got.tolist() == [0, 0, 5, 10, 10]


def test_scaling_may_invert() -> None:
    assert scale([0, 1], (0, 1), (1, -1)).tolist() == [1, -1]


def test_an_empty_source_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="source_min 1 must be below source_max 1"):
        scale([0], (1, 1), (0, 1))


def test_dapo_overlong_penalty() -> None:
    """Limit 100, buffer 20: nothing up to 80 tokens, then linear to -1, and never below."""
    got = overlong_penalty([0, 50, 80, 90, 100, 110], limit=100, buffer=20, penalty=1)
    assert got.tolist() == [0, 0, 0, -0.5, -1, -1]


def test_the_penalty_scales() -> None:
    assert overlong_penalty([90, 200], limit=100, buffer=20, penalty=3).tolist() == [-1.5, -3]


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_buffer_outside_the_limit_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match="overlong_buffer_length"):
        overlong_penalty([1], limit=100, buffer=buffer, penalty=1)


def test_off_by_default() -> None:
    rewards = [0.0, 0.25, 7.0]
    assert transform(rewards, [1, 99, 500], grpo_config()).tolist() == rewards


def test_scaling_comes_before_the_penalty() -> None:
    config = grpo_config(
        reward_scaling=RewardScalingConfig(
            enabled=True, source_min=0.0, source_max=1.0, target_min=0.0, target_max=5.0
        ),
        reward_shaping=RewardShapingConfig(
            enabled=True, overlong_buffer_length=20, overlong_buffer_penalty=1.0, max_response_length=100
        ),
    )
    assert transform([1, 1, 2], [10, 90, 100], config).tolist() == [5, 4.5, 4]


def test_a_batch_is_informative_by_its_raw_rewards() -> None:
    """R-30: all answers are right; their shaped rewards differ by length alone, and the group still teaches nothing."""
    raw, groups, valid = [1.0, 1.0, 1.0, 0.0], [0, 0, 1, 1], [True] * 4
    shaped = raw + overlong_penalty([10, 95, 10, 10], limit=100, buffer=20, penalty=1)
    assert shaped[0] != shaped[1]
    assert informative(raw, groups, valid).tolist() == [False, False, True, True]


def test_a_group_is_not_informative_by_a_masked_sample() -> None:
    assert informative([1, 1, 0], [0] * 3, [True, True, False]).tolist() == [False] * 3


def test_overlong_filtering_masks_the_loss_and_keeps_the_baseline() -> None:
    """A truncated sample stays among the rewards that its group is compared with."""
    rewards, valid, truncated = [1, 0, 0], [True] * 3, [False, False, True]
    assert trainable(valid, truncated, overlong_filtering=True).tolist() == [True, True, False]
    assert trainable(valid, truncated, overlong_filtering=False).tolist() == [True] * 3
    assert grpo(rewards, [0] * 3, valid, normalize=False).tolist() == [1, -0.5, -0.5]
