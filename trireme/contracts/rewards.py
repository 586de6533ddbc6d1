"""Rewards: a score, a policy failure, or an infrastructure failure. Only the first two reach a gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trireme.contracts.errors import ContractError
from trireme.contracts.v1.sample_pb2 import InfrastructureFailure, PolicyFailure, Reward, Score


def score(value: float, components: Mapping[str, float] | None = None, *, verifier: str, version: str = "") -> Reward:
    """A judged answer. Raises ContractError when a value is not finite: that is a scorer's failure, not a score."""
    for name, number in {"value": value, **(components or {})}.items():
        _check_finite(f"reward.score.{name}", number)
    return Reward(score=Score(value=value, components=components), verifier=verifier, verifier_version=version)


def policy_failure(reason: str, *, verifier: str, version: str = "") -> Reward:
    """The model's answer cannot be scored: malformed or forbidden."""
    return Reward(policy_failure=PolicyFailure(reason=_text(reason)), verifier=verifier, verifier_version=version)


def infrastructure_failure(reason: str, attempts: int, *, verifier: str, version: str = "") -> Reward:
    """The scorer failed `attempts` times: timeout, crash, unreachable."""
    failure = InfrastructureFailure(reason=_text(reason), attempts=attempts)
    return Reward(infrastructure_failure=failure, verifier=verifier, verifier_version=version)


def reward_value(reward: Reward, policy_failure_score: float) -> float | None:
    """What a gradient may use: the score, `policy_failure_score`, or None for a failure of the infrastructure.

    A score of 0 is 0.0, never None. Raises ContractError when no outcome is set or the score is not finite.
    """
    outcome = reward.WhichOneof("outcome")
    if outcome == "score":
        return _check_finite("reward.score.value", reward.score.value)
    if outcome == "policy_failure":
        return policy_failure_score
    if outcome == "infrastructure_failure":
        return None
    raise ContractError("reward.outcome", "is not set: expected a score or a failure")


def _text(reason: str) -> str:
    """As protobuf takes it: a verifier's words may quote half of a surrogate pair."""
    return reason.encode("utf-8", "backslashreplace").decode()


def _check_finite(field: str, value: float) -> float:
    if not math.isfinite(value):
        raise ContractError(field, f"is {value}; a score must be finite")
    return value
