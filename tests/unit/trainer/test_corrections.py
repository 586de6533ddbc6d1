"""Importance weights between engine and trainer, for tokens whose weight is known by construction."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from services.trainer.corrections import Correction, Weights, importance_weights
from services.trainer.objectives.base import Terms
from tests.unit.trainer.builders import batch_of


def weigh(ratios: list[list[float]], correction: Correction) -> Weights:
    """Weights at trained tokens of sequences whose trainer/engine ratios are given, without prompts."""
    batch = batch_of([[True] * len(one) for one in ratios], prompts=0)
    log_ratio = torch.tensor([math.log(r) if r > 0 else -math.inf for one in ratios for r in one])
    old = batch.generation_log_probs + log_ratio
    return importance_weights(Terms.of(old, replace(batch, old_log_probs=None)), correction)


def values(ratios: list[list[float]], correction: Correction) -> list[float]:
    return weigh(ratios, correction).values.tolist()


def test_unbounded() -> None:
    assert values([[0.25, 1, 8]], Correction()) == pytest.approx([0.25, 1, 8], rel=1e-5)


def test_tis_clamps() -> None:
    assert values([[0.1, 1.5, 9]], Correction("tis", high=2)) == pytest.approx([0.1, 1.5, 2], rel=1e-5)
    assert values([[0.1, 1.5, 9]], Correction("tis", 0.5, 2)) == pytest.approx([0.5, 1.5, 2], rel=1e-5)


def test_icepop_drops_tokens_outside() -> None:
    got = weigh([[0.4, 0.6, 4.9, 5.1]], Correction("icepop", 0.5, 5))
    assert got.values.tolist() == pytest.approx([0, 0.6, 4.9, 0], rel=1e-5)
    assert got.dropped.tolist() == got.outside.tolist() == [True, False, False, True]


def test_seq_mask_tis_judges_the_sequence_and_keeps_the_weights_inside() -> None:
    """The first sequence's geometric mean is 1 although its tokens are far apart; the second's is 1.01."""
    got = values([[2, 0.5], [1.01, 1.01]], Correction("seq-mask-tis", 0.999, 1.002))
    assert got == pytest.approx([2, 0.5, 0, 0], rel=1e-5)


def test_outside_counts_what_was_clamped() -> None:
    got = weigh([[0.1, 1.5, 9]], Correction("tis", 0.5, 2))
    assert got.outside.tolist() == [True, False, True]
    assert not got.dropped.any()


def test_sequence_level_takes_the_mean() -> None:
    """A sum over 400 tokens of log 0.97 would be e^-12: the weight must not die with the length."""
    got = values([[0.97] * 400, [4, 0.25, 1]], Correction(sequence_level=True))
    assert got[0] == pytest.approx(0.97, rel=1e-4)
    assert got[-1] == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("correction", [Correction(), Correction("tis", 0.5, 2), Correction("icepop", 0.5, 5)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_gets_no_weight(bad: float, correction: Correction) -> None:
    """P-13: a token that is nan or impossible on one side is not trained on; its neighbours are."""
    batch = batch_of([[True, True]], prompts=0)
    generation = torch.tensor([bad, -1.0])
    terms = Terms.of(torch.tensor([-1.0, -1.0]), replace(batch, old_log_probs=None, generation_log_probs=generation))
    assert importance_weights(terms, correction).values.tolist() == [0, 1]


def test_one_bad_token_drops_its_sequence_at_sequence_level() -> None:
    batch = batch_of([[True, True], [True]], prompts=0)
    generation = torch.tensor([math.nan, -1.0, -1.0])
    terms = Terms.of(torch.full((3,), -1.0), replace(batch, old_log_probs=None, generation_log_probs=generation))
    assert importance_weights(terms, Correction(sequence_level=True)).values.tolist() == [0, 0, 1]


def test_the_log_ratio_is_guarded() -> None:
    got = values([[math.exp(50), math.exp(-50)]], Correction())
    assert got == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-4)


def test_no_gradient_flows_through() -> None:
    batch = replace(batch_of([[True] * 3]), old_log_probs=None)
    leaf = torch.zeros(5, requires_grad=True)
    assert not importance_weights(Terms.of(leaf, batch), Correction()).values.requires_grad


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("tis",), "truncated_importance_sampling_ratio must be set"),
        (("icepop", None, 5.0), "ratio_min must be set"),
        (("icepop", 6.0, 5.0), "ratio_min 6.0 must be within"),
        (("tiss", None, 2.0), "got 'tiss'"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(arguments: tuple[str, float, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Correction(*arguments)  # type: ignore[arg-type]
