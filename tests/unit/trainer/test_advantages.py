"""Advantages against the numbers of the papers' formulas and against loops in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from services.trainer.advantages import compute_advantages, grpo, statistics
from tests.unit.trainer.builders import grpo_config


def one_group(rewards: ArrayLike, **options: bool) -> list[float]:
    count = len(np.asarray(rewards))
    return grpo(rewards, [0] * count, [True] * count, **options).tolist()


def exact(rewards: list[float], normalize: bool, leave_one_out: bool) -> list[float]:
    """The same estimator sample by sample, in fractions up to the square root."""
    values = [Fraction(r) for r in rewards]
    result = []
    for i, value in enumerate(values):
        others = values[:i] + values[i + 1 :] if leave_one_out else values
        baseline = sum(others, Fraction(0)) / len(others)
        if not normalize or len(set(others)) == 1:
            result.append(float(value - baseline))
            continue
        variance = sum(((o - baseline) ** 2 for o in others), Fraction(0)) / (len(others) - 1)
        result.append(float(value - baseline) / (math.sqrt(variance) + 1e-6))
    return result


class TestGolden:
    def test_whole_group(self) -> None:
        assert one_group([1, 0, 0, 0], leave_one_out=False) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)

    def test_dr_grpo(self) -> None:
        got = one_group([1, 0, 0, 0], normalize=False, leave_one_out=False)
        assert got == pytest.approx([0.75, -0.25, -0.25, -0.25])

    def test_rloo(self) -> None:
        assert one_group([1, 0, 0, 0], normalize=False) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])

    def test_leave_one_out_normalized(self) -> None:
        assert one_group([1, 0, 0, 1]) == pytest.approx([1.1547, -1.1547, -1.1547, 1.1547], abs=1e-4)

    @pytest.mark.parametrize("leave_one_out", [True, False])
    @pytest.mark.parametrize("value", [0.7, 0.1, np.float32(0.7), 1 / 3])
    def test_equal_rewards_are_exactly_zero(self, value: float, leave_one_out: bool) -> None:
        """L-08: float32 gives .056 for [0.7] * 8."""
        assert one_group([value] * 8, leave_one_out=leave_one_out) == [0.0] * 8

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_the_odd_one_out_stays_moderate(self, dtype: type) -> None:
        """L-08: float32 gives -2075 for the first of [0, .95 x 7]."""
        got = one_group(np.array([0] + [0.95] * 7, dtype))
        assert got[0] == pytest.approx(-0.95, abs=1e-6)
        assert np.abs(got).max() < 3

    def test_a_leave_one_out_set_without_variance_is_left_unnormalized(self) -> None:
        """L-09: for the last of [1, 1, 1, 0] the others have deviation 0."""
        assert one_group([1, 1, 1, 0])[3] == -1.0

    def test_two_samples_compare_with_one(self) -> None:
        """L-09: a single other sample has no deviation."""
        assert one_group([1, 0]) == [1.0, -1.0]

    @pytest.mark.parametrize("options", [{}, {"normalize": False}, {"leave_one_out": False}])
    def test_a_single_sample_has_none(self, options: dict[str, bool]) -> None:
        """L-10: one valid sample gives 0, never nan."""
        assert one_group([0.3], **options) == [0.0]

    def test_two_groups_whose_samples_alternate(self) -> None:
        got = grpo([1, 5, 0, 5, 0, 7], ["a", "b"] * 3, [True] * 6, normalize=False)
        assert got.tolist() == pytest.approx([1, -1, -0.5, -1, -0.5, 2])


class TestMaskedSamples:
    def test_they_are_in_neither_mean_nor_deviation(self) -> None:
        """R-28: an infrastructure failure leaves the others as if it had not been sampled."""
        got = grpo([1, 0, 99, 0, 1], [3] * 5, [True, True, False, True, True])
        assert got.tolist() == pytest.approx([1.1547, -1.1547, 0, -1.1547, 1.1547], abs=1e-4)

    def test_their_reward_may_be_nan(self) -> None:
        assert np.isfinite(grpo([1, float("nan"), 0], [0] * 3, [True, False, True])).all()

    def test_one_valid_sample_has_no_advantage(self) -> None:
        assert grpo([1, 0, 0], [0] * 3, [True, False, False]).tolist() == [0, 0, 0]

    def test_none_valid(self) -> None:
        assert grpo([1, 0], [0] * 2, [False, False]).tolist() == [0, 0]

    def test_a_valid_reward_that_is_not_a_number_is_refused(self) -> None:
        with pytest.raises(ValueError, match="reward of sample 1 is nan"):
            grpo([1, float("nan")], [0, 0], [True, True])

    def test_shapes_must_agree(self) -> None:
        """R-24: two rewards for three samples are not stretched."""
        with pytest.raises(ValueError, match="one length"):
            grpo([1, 0, 1], [0, 0], [True, True])


rewards_of_a_group = st.lists(
    st.one_of(st.sampled_from([0.0, 1.0, 0.5]), st.floats(-5, 5, allow_nan=False, width=32)), min_size=2, max_size=9
)


@given(rewards_of_a_group, st.booleans(), st.booleans())
def test_equals_exact_arithmetic(rewards: list[float], normalize: bool, leave_one_out: bool) -> None:
    got = one_group(rewards, normalize=normalize, leave_one_out=leave_one_out)
    assert got == pytest.approx(exact(rewards, normalize, leave_one_out), rel=1e-6, abs=1e-6)


@given(rewards_of_a_group, st.floats(-3, 3))
def test_order_and_offset_do_not_matter(rewards: list[float], offset: float) -> None:
    order = np.random.default_rng(7).permutation(len(rewards))
    plain = np.array(one_group(rewards, normalize=False))
    moved = np.array(one_group([rewards[i] + offset for i in order], normalize=False))
    assert moved == pytest.approx(plain[order], abs=1e-9)


@given(rewards_of_a_group)
def test_a_whole_group_sums_to_zero(rewards: list[float]) -> None:
    assert sum(one_group(rewards, leave_one_out=False, normalize=False)) == pytest.approx(0, abs=1e-9)


def test_the_configuration_chooses_the_form() -> None:
    config = grpo_config(normalize_rewards=False, use_leave_one_out_baseline=False)
    got = compute_advantages([1, 0, 0, 0], [0] * 4, [True] * 4, config)
    assert got.dtype == np.float64
    assert got.tolist() == [0.75, -0.25, -0.25, -0.25]
    default = compute_advantages([1, 0, 0, 1], [0] * 4, [True] * 4, grpo_config())
    assert default[0] == pytest.approx(1.1547, abs=1e-4)


def test_statistics() -> None:
    """L-15: means are over valid samples, not means of group means; a masked sample counts nowhere."""
    rewards, groups = [1.0, 0.0, 1.0, 1.0, 1.0, 9.0], [0, 0, 1, 1, 1, 1]
    valid = [True] * 5 + [False]
    got = statistics(rewards, groups, valid, grpo(rewards, groups, valid))
    assert got.groups == 2
    assert got.zero_variance_fraction == 0.5
    assert got.reward_mean == pytest.approx(0.8)
    assert got.valid_fraction == pytest.approx(5 / 6)
    assert (got.advantage_min, got.advantage_max) == (-1, 1)


def test_statistics_of_nothing() -> None:
    assert statistics([1.0], [0], [False], [0.0]).groups == 0
