"""Rewards as messages."""

from __future__ import annotations

from trireme.contracts import rewards
from trireme.contracts.v1.sample_pb2 import Reward


def test_a_reason_that_is_no_text_is_still_told() -> None:
    """A verifier may quote what a model wrote, half a surrogate pair included; protobuf takes text only."""
    policy = rewards.policy_failure("cut at \ud83d", verifier="v")
    failure = rewards.infrastructure_failure("cut at \ud83d", 3, verifier="v")
    assert Reward.FromString(policy.SerializeToString()).policy_failure.reason == "cut at \\ud83d"
    assert Reward.FromString(failure.SerializeToString()).infrastructure_failure.reason == "cut at \\ud83d"
