"""Mismatch metrics, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from services.trainer.batch import Batch
from services.trainer.corrections import Correction
from services.trainer.mismatch import mismatch
from tests.unit.trainer.builders import batch_of


def apart(gaps: list[float], ages: list[int] | None = None) -> tuple[torch.Tensor, Batch]:
    """One response token for each gap (trainer minus engine), each in its own sequence."""
    batch = batch_of([[True] for _ in gaps], prompts=1)
    log_probs = torch.full((2 * len(gaps),), 3.0)
    log_probs[1::2] = batch.generation_log_probs[1::2] + torch.tensor(gaps)
    return log_probs, replace(batch, age=torch.tensor(ages or [0] * len(gaps)))


def test_agreement() -> None:
    got = mismatch(*apart([0.0] * 4))
    assert got["token_mult_prob_error"] == got["token_mult_prob_error_p99"] == 1
    assert got["gen_kl_error"] == got["policy_kl_error"] == 0
    assert got["effective_sample_size"] == 1


def test_values() -> None:
    got = mismatch(*apart([math.log(2), -math.log(2), 0.0, 0.0]))
    assert got["token_mult_prob_error"] == pytest.approx((2 + 2 + 1 + 1) / 4, rel=1e-6)
    assert got["gen_kl_error"] == pytest.approx((2 - 1 + 0.5 - 1) / 4, rel=1e-5)  # the log terms cancel
    assert got["policy_kl_error"] == pytest.approx(got["gen_kl_error"], rel=1e-5)
    assert got["effective_sample_size"] == pytest.approx(4.5**2 / (4 + 0.25 + 1 + 1) / 4, rel=1e-5)


def test_the_two_directions_differ() -> None:
    got = mismatch(*apart([1.0]))
    assert got["gen_kl_error"] == pytest.approx(math.e - 2, rel=1e-5)
    assert got["policy_kl_error"] == pytest.approx(math.exp(-1), rel=1e-5)


def test_quantiles_show_what_the_mean_hides() -> None:
    """P-11: 2 % of tokens off by e disappear in the mean."""
    got = mismatch(*apart([1.0, -1.0] + [0.0] * 98))
    assert got["token_mult_prob_error"] < 1.05
    assert got["token_mult_prob_error_p50"] == 1
    assert got["token_mult_prob_error_p99"] == pytest.approx(math.e, rel=1e-3)


def test_by_age() -> None:
    got = mismatch(*apart([0.0, math.log(3), math.log(3)], ages=[0, 1, 1]))
    assert got["token_mult_prob_error/age_0"] == 1
    assert got["token_mult_prob_error/age_1"] == pytest.approx(3, rel=1e-5)
    assert got["sample_age_mean"] == pytest.approx(2 / 3)
    assert got["sample_age_max"] == 1


def test_untrained_tokens_do_not_count() -> None:
    """T-09: the first token of each sequence is 3 nats off and is not trained."""
    log_probs, batch = apart([0.1])
    assert mismatch(log_probs, batch)["token_mult_prob_error"] == pytest.approx(math.exp(0.1), rel=1e-5)


def test_what_the_correction_drops() -> None:
    log_probs, batch = apart([0.0, math.log(10), math.log(10), 0.0], ages=[0, 0, 1, 1])
    got = mismatch(log_probs, batch, Correction("icepop", 0.5, 5))
    assert got["masked_fraction"] == got["masked_fraction/age_1"] == 0.5
    assert mismatch(log_probs, batch)["masked_fraction"] == 0


def test_tokens_that_are_not_finite_are_counted_apart() -> None:
    log_probs, batch = apart([0.0, 0.0])
    log_probs[1] = float("nan")
    got = mismatch(log_probs, batch)
    assert got["nonfinite_fraction"] == 0.5
    assert got["token_mult_prob_error"] == 1


def test_nothing_trained() -> None:
    batch = batch_of([[False]])
    assert mismatch(torch.zeros(3), batch) == {}
