"""A sample that breaks the contract is refused by the name of its field."""

from __future__ import annotations

import math

import pytest

from trireme.contracts import rewards
from trireme.contracts.errors import ContractError
from trireme.contracts.ids import new_trace_id, sample_id, split_sample_id
from trireme.contracts.samples import validate
from trireme.contracts.v1.sample_pb2 import FINISH_REASON_STOP, Reward, Sample, Span, VersionSpan


def sample(**changes: object) -> Sample:
    """A valid sample of three response tokens under two versions, with `changes`."""
    fields: dict[str, object] = {
        "id": "g/1",
        "group_id": "g",
        "group_index": 1,
        "group_size": 2,
        "prompt_token_ids": [1, 2],
        "response_token_ids": [3, 4, 5],
        "log_probs": [-0.5, 0.0, -2.0],
        "versions": [VersionSpan(start=0, length=2, version=1), VersionSpan(start=2, length=1, version=2)],
        "loss_spans": [Span(start=0, length=3)],
        "finish_reason": FINISH_REASON_STOP,
        "temperature": 1.0,
    }
    return Sample(**(fields | changes))  # type: ignore[arg-type]


def test_valid_samples_pass() -> None:
    validate(sample())
    validate(sample(reward=rewards.score(0.0, verifier="v")))


def test_empty_response_is_valid() -> None:
    """T-15: nothing generated is 0 tokens, not an error."""
    validate(sample(response_token_ids=[], log_probs=[], versions=[], loss_spans=[]))


def test_rounding_above_zero_is_valid() -> None:
    validate(sample(log_probs=[-0.5, 1e-6, -2.0]))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("id", {"id": "g/0"}),
        ("group_id", {"group_id": ""}),
        ("group_index", {"group_index": 2}),
        ("prompt_token_ids", {"prompt_token_ids": []}),
        ("log_probs", {"log_probs": [-0.5, -1.0]}),
        ("log_probs", {"log_probs": [-0.5, math.nan, -1.0]}),  # P-13
        ("log_probs", {"log_probs": [-0.5, -math.inf, -1.0]}),
        ("log_probs", {"log_probs": [-0.5, 0.1, -1.0]}),
        ("versions", {"versions": []}),
        ("versions", {"versions": [VersionSpan(start=1, length=2, version=1)]}),
        ("loss_spans", {"loss_spans": [Span(start=2, length=2)]}),
        ("temperature", {"temperature": -1.0}),
        ("temperature", {"temperature": math.nan}),
        ("finish_reason", {"finish_reason": 0}),
        ("reward.outcome", {"reward": Reward(verifier="v")}),
        ("reward.score.value", {"reward": Reward(score={"value": math.nan})}),
    ],
)
def test_the_error_names_the_field(field: str, changes: dict[str, object]) -> None:
    """P-13 among them: NaN log-probs never get into a service."""
    with pytest.raises(ContractError) as caught:
        validate(sample(**changes))
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_zero_is_a_score_and_failures_are_not() -> None:
    """R-25, R-28: a score of 0 stays 0.0, a failed scorer gives nothing, a failed answer what the run says."""
    outcomes = [
        rewards.score(0.0, verifier="v"),
        rewards.policy_failure("unclosed", verifier="v"),
        rewards.infrastructure_failure("timeout", 3, verifier="v"),
    ]
    assert [rewards.reward_value(outcome, policy_failure_score=-1.0) for outcome in outcomes] == [0.0, -1.0, None]


def test_a_reward_without_outcome_is_refused() -> None:
    with pytest.raises(ContractError, match=r"^reward.outcome: "):
        rewards.reward_value(Reward(), policy_failure_score=0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_are_finite(value: float) -> None:
    with pytest.raises(ContractError, match=r"reward.score.value"):
        rewards.score(value, verifier="v")
    with pytest.raises(ContractError, match=r"reward.score.format"):
        rewards.score(1.0, {"format": value}, verifier="v")


def test_sample_ids_come_apart_again() -> None:
    assert split_sample_id(sample_id("run/7", 3)) == ("run/7", 3)
    for text in ("group", "/3", "g/x", "g/"):
        with pytest.raises(ValueError, match="not a sample id"):
            split_sample_id(text)


def test_trace_ids_are_w3c() -> None:
    first, second = new_trace_id(), new_trace_id()
    assert first != second
    assert len(first) == 32 and int(first, 16) > 0
