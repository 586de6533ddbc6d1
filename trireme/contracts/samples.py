"""The rules that every Sample obeys, checked where one enters a service."""

from __future__ import annotations

import math

from trireme.contracts.errors import ContractError
from trireme.contracts.ids import sample_id
from trireme.contracts.rewards import reward_value
from trireme.contracts.spans import check_cover, check_order
from trireme.contracts.v1.sample_pb2 import FINISH_REASON_UNSPECIFIED, Sample

# A log-softmax in float32 may round to just above 0; more than this is not a probability.
LOG_PROB_SLACK = 1e-4


def validate(sample: Sample) -> None:
    """Raises ContractError naming the field at fault; an empty response is fine. The reward is checked when set."""
    _check_identity(sample)
    _check_tokens(sample)
    length = len(sample.response_token_ids)
    check_cover(sample.versions, length, "versions")
    check_order(sample.loss_spans, length, "loss_spans")
    if sample.HasField("reward"):
        reward_value(sample.reward, policy_failure_score=0.0)


def _check_identity(sample: Sample) -> None:
    if not sample.group_id:
        raise ContractError("group_id", "is empty")
    if sample.group_index >= sample.group_size:
        raise ContractError("group_index", f"is {sample.group_index} in a group of {sample.group_size}")
    expected = sample_id(sample.group_id, sample.group_index)
    if sample.id != expected:
        raise ContractError("id", f"is {sample.id!r}; for its group and index it must be {expected!r}")


def _check_tokens(sample: Sample) -> None:
    if not sample.prompt_token_ids:
        raise ContractError("prompt_token_ids", "is empty")
    tokens, log_probs = len(sample.response_token_ids), len(sample.log_probs)
    if tokens != log_probs:
        raise ContractError("log_probs", f"has {log_probs} values for {tokens} response tokens")
    for position, value in enumerate(sample.log_probs):
        if not math.isfinite(value) or value > LOG_PROB_SLACK:
            raise ContractError("log_probs", f"is {value} at response token {position}; must be finite and at most 0")
    if not math.isfinite(sample.temperature) or sample.temperature < 0:
        raise ContractError("temperature", f"is {sample.temperature}; must be 0 (greedy) or positive")
    if sample.finish_reason == FINISH_REASON_UNSPECIFIED:
        raise ContractError("finish_reason", "is not set")
