"""From samples to the record that carries them to a gradient: token ids, masks and log-probs in their places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.assembly import Assembler, Group
from services.trainer.batch import Batch
from services.trainer.batching import Flat, flatten, to_batch
from tests.unit.trainer.builders import TEMPERATURE, sample
from trireme.contracts import rewards
from trireme.contracts.v1 import sample_pb2

EOS = 2


def groups_of(*samples: sample_pb2.Sample) -> list[Group]:
    assembler = Assembler(9)
    for one in samples:
        assembler.add(one)
    whole = [group for group in assembler.waiting if group.complete]
    return assembler.ready(len(whole), 1) or []


def batch_from(*samples: sample_pb2.Sample, version: int = 1, **keys: Any) -> Batch:
    flat = flatten(groups_of(*samples), 0.0)
    return make(flat, version=version, **keys)


def make(flat: Flat, *, version: int = 1, temperature: float = TEMPERATURE, trained: Any = None) -> Batch:
    advantages = np.arange(1, len(flat) + 1).astype(np.float64)
    return to_batch(flat, advantages, flat.valid if trained is None else trained, version, temperature)


def test_a_value_stands_at_its_own_token() -> None:
    """T-08: prompt of 3, response of 2; the mask, log-prob and advantage of a token are at its position."""
    batch = batch_from(sample(size=1, prompt=(5, 6, 7), response=(21, 22), log_probs=[-0.5, -0.25]))
    assert batch.tokens.tolist() == [5, 6, 7, 21, 22]
    assert batch.loss_mask.tolist() == [False, False, False, True, True]
    assert batch.generation_log_probs.tolist() == [0, 0, 0, -0.5, -0.25]
    assert batch.advantages.tolist() == [0, 0, 0, 1, 1]
    assert batch.lengths.tolist() == [5]
    assert batch.prompt_lengths.tolist() == [3]


def test_the_end_token_is_trained() -> None:
    """T-05: with pad equal to eos, [21, 22, eos] keeps its three tokens, and padding does not exist."""
    batch = batch_from(sample(size=1, prompt=(5,), response=(21, 22, EOS)))
    assert batch.loss_mask.tolist() == [False, True, True, True]


def test_an_end_token_in_the_prompt_is_a_token() -> None:
    """T-06: [5, eos, 7] stays three tokens of context, and none of them is trained."""
    batch = batch_from(sample(size=1, prompt=(5, EOS, 7), response=(21,)))
    assert batch.tokens.tolist() == [5, EOS, 7, 21]
    assert batch.loss_mask.tolist() == [False, False, False, True]


def test_tool_tokens_are_context() -> None:
    """T-09, T-03: turns a a o o a give the mask 1 1 0 0 1, with nothing at the tokens of others."""
    batch = batch_from(sample(size=1, prompt=(5,), response=(1, 2, 3, 4, 5), trained=[(0, 2), (4, 1)]))
    assert batch.loss_mask.tolist() == [False, True, True, False, False, True]
    assert (batch.generation_log_probs != 0).tolist() == batch.loss_mask.tolist()
    assert (batch.advantages != 0).tolist() == batch.loss_mask.tolist()
    assert batch.normalizer().tokens == 3


def test_an_empty_response_counts_as_no_tokens() -> None:
    """T-15: its reward still enters the baseline; it adds no sequence to the batch."""
    flat = flatten(groups_of(sample(index=0, response=(), score=1.0), sample(index=1, score=0.0)), 0.0)
    assert flat.response_lengths.tolist() == [0, 2]
    assert flat.rewards.tolist() == [1, 0]
    assert flat.valid.tolist() == [True, True]
    batch = make(flat)
    assert len(batch) == 1
    assert batch.advantages.unique().tolist() == [0, 2]


def test_nobody_retokenises() -> None:
    """T-02, T-10: ids of the engine, also where no tokenizer would write them, and a prompt the engine returned."""
    batch = batch_from(sample(size=1, prompt=(49151, 0), response=(7, 7, 0, 49151)))
    assert batch.tokens.tolist() == [49151, 0, 7, 7, 0, 49151]


def test_samples_that_may_not_be_trained_are_left_out() -> None:
    flat = flatten(groups_of(*(sample(index=i, size=4, score=None if i == 1 else 1.0) for i in range(4))), 0.0)
    batch = make(flat, trained=flat.valid & np.array([True, True, False, True]))
    assert len(batch) == 2
    assert batch.advantages.unique().tolist() == [0, 1, 4]


def test_groups_are_numbered_and_ages_counted() -> None:
    samples = [sample(name, index, version=v) for name, v in (("a", 7), ("b", 6)) for index in range(2)]
    flat = flatten(groups_of(*samples), 0.0)
    batch = make(flat, version=8)
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.age.tolist() == [1, 1, 2, 2]


def test_rewards_by_outcome() -> None:
    """A score of 0 is 0, a policy failure is what the configuration says, an infrastructure failure is not valid."""
    outcomes = [
        rewards.score(0.0, verifier="t"),
        rewards.policy_failure("malformed", verifier="t"),
        rewards.infrastructure_failure("timeout", 3, verifier="t"),
    ]
    flat = flatten(groups_of(*(sample(index=i, size=3, reward=one) for i, one in enumerate(outcomes))), -0.5)
    assert flat.rewards.tolist() == [0, -0.5, 0]
    assert flat.valid.tolist() == [True, True, False]


def test_truncation_is_by_finish_reason() -> None:
    one = sample(index=0, finish_reason=sample_pb2.FINISH_REASON_LENGTH)
    flat = flatten(groups_of(one, sample(index=1)), 0.0)
    assert flat.truncated.tolist() == [True, False]


def test_lengths_are_in_tokens() -> None:
    """T-11: a long text of few tokens is short; tokens of all turns count, trained ones apart."""
    one = sample(size=1, response=range(9), trained=[(0, 4)], response_text="x" * 300)
    flat = flatten(groups_of(one), 0.0)
    assert flat.response_lengths.tolist() == [9]
    assert flat.trained_tokens.tolist() == [4]


def test_nothing_to_train() -> None:
    batch = batch_from(sample(size=1, response=()))
    assert len(batch) == 0
    assert batch.normalizer().tokens == 1


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_cannot_divide_is_refused(temperature: float) -> None:
    """P-04: greedy samples have no distribution to train."""
    with pytest.raises(ValueError, match="temperature must be above 0"):
        batch_from(sample(size=1), temperature=temperature)


def test_another_temperature_than_the_samples_is_refused() -> None:
    """P-03: the trainer's log-probs would be of another distribution than the recorded ones."""
    with pytest.raises(ValueError, match=r"g/0: sampled at temperature 0\.7, the trainer uses 1"):
        batch_from(sample(size=1), temperature=1)


def test_an_integer_temperature_is_that_number() -> None:
    """P-04: 1 is 1.0."""
    assert len(batch_from(sample(size=1, temperature=1.0), temperature=1)) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"log_probs": [-1.0]}, "1 log-probs for 2 response tokens"),
        ({"log_probs": [-1.0, float("nan")]}, "not finite"),
        ({"trained": [(1, 2)]}, "reaches beyond its 2 response tokens"),
        ({"prompt": ()}, "no prompt token"),
    ],
)
def test_a_sample_that_disagrees_with_itself_is_named(fields: dict[str, Any], message: str) -> None:
    assembler = Assembler(9, validate=lambda one: None)
    assembler.add(sample(size=1, **fields))
    with pytest.raises(ValueError, match=f"g/0: .*{message}"):
        make(flatten(assembler.ready(1, 1) or [], 0.0))


def test_dtypes() -> None:
    batch = batch_from(sample(size=1))
    assert batch.tokens.dtype == batch.lengths.dtype == batch.group.dtype == batch.age.dtype == torch.int64
    assert batch.generation_log_probs.dtype == batch.advantages.dtype == torch.float32
    assert batch.loss_mask.dtype == torch.bool
