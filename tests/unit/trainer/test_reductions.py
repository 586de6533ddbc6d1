"""How losses per token become one number."""

from __future__ import annotations

import pytest
import torch

from services.trainer.batch import Normalizer
from services.trainer.objectives.base import (
    ConstantLength,
    Reduction,
    Terms,
    seq_mean_token_mean,
    seq_mean_token_sum,
    sequence_means,
    token_mean,
)
from tests.unit.trainer.builders import batch_of

CASES = [(token_mean, 1.75), (seq_mean_token_mean, 2.5), (seq_mean_token_sum, 3.5), (ConstantLength(7), 0.5)]


def terms_of(responses: list[list[bool]]) -> Terms:
    batch = batch_of(responses, prompts=1)
    return Terms.of(torch.zeros(len(batch.tokens)), batch)


@pytest.mark.parametrize(("reduction", "expected"), CASES)
def test_names_mean_what_they_say(reduction: Reduction, expected: float) -> None:
    """L-05: token losses [4] and [1, 1, 1]."""
    terms = terms_of([[True], [True] * 3])
    losses = torch.tensor([9.0, 4, 9, 1, 1, 1])
    assert float(reduction(losses, terms, Normalizer(tokens=4, sequences=2))) == pytest.approx(expected)


@pytest.mark.parametrize(("reduction", "expected"), CASES)
def test_masked_sequences_do_not_count(reduction: Reduction, expected: float) -> None:
    """A sequence without a trained token is in no divisor; the batch's own normalizer is used."""
    batch = batch_of([[True], [False, False], [True] * 3], prompts=1)
    losses = torch.tensor([9.0, 4, 9, 9, 9, 9, 1, 1, 1])
    got = reduction(losses, Terms.of(torch.zeros(9), batch), batch.normalizer())
    assert float(got) == pytest.approx(expected)


def test_sequence_means_are_over_trained_tokens() -> None:
    """L-18: lengths 2 and 4, one token of each untrained."""
    terms = terms_of([[True, False], [True, True, False, True]])
    values = torch.tensor([7.0, 2, 7, 7, 1, 2, 7, 6])
    assert sequence_means(values, terms).tolist() == [2, 3]


def test_a_constant_length_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ConstantLength(0)
