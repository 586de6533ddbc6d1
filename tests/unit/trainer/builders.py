"""Small batches, samples and configurations for the tests of the trainer's pure parts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from services.trainer.batch import Batch
from trireme.config.blocks.grpo import GrpoConfig, RewardScalingConfig, RewardShapingConfig
from trireme.config.blocks.loss_fn import LossConfig
from trireme.contracts import rewards
from trireme.contracts.ids import sample_id
from trireme.contracts.v1 import sample_pb2

TEMPERATURE = 0.7


def ended() -> Future[None]:
    """The future of a save that is done when it returns."""
    future = Future[None]()
    future.set_result(None)
    return future


def loss_config(**keys: Any) -> LossConfig:
    """`loss_fn` without the reference KL unless asked."""
    return LossConfig(**{"reference_policy_kl_penalty": 0.0} | keys)


def grpo_config(**keys: Any) -> GrpoConfig:
    """A `grpo` block, with a resolved limit in its shaping."""
    blocks = {"reward_shaping": RewardShapingConfig(max_response_length=100), "reward_scaling": RewardScalingConfig()}
    return GrpoConfig(**blocks | keys)


def batch_of(
    responses: Sequence[Sequence[bool]], *, prompts: int = 2, advantages: Sequence[float] | None = None, seed: int = 0
) -> Batch:
    """One sequence for each of `responses`, whose entries say which of its response tokens are trained.

    Log-probs are random, within about 0.3 of each other; None of the optional fields is missing.
    """
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([prompts + len(one) for one in responses], dtype=torch.int64)
    mask = torch.tensor([m for one in responses for m in [False] * prompts + list(one)], dtype=torch.bool)
    total = int(lengths.sum())
    per_sequence = torch.tensor(advantages) if advantages is not None else torch.randn(len(responses), generator=rng)

    def masked(values: Tensor) -> Tensor:
        return torch.where(mask, values, 0.0)

    base = -torch.rand(total, generator=rng) * 3
    near = [masked(base + 0.3 * torch.randn(total, generator=rng)) for _ in range(3)]
    return Batch(
        tokens=torch.randint(0, 50, (total,), generator=rng),
        lengths=lengths,
        prompt_lengths=torch.full((len(responses),), prompts, dtype=torch.int64),
        group=torch.arange(len(responses)),
        age=torch.zeros(len(responses), dtype=torch.int64),
        loss_mask=mask,
        generation_log_probs=near[0],
        advantages=masked(torch.repeat_interleave(per_sequence.float(), lengths)),
        old_log_probs=near[1],
        reference_log_probs=near[2],
    )


def current_log_probs(batch: Batch, seed: int = 1, spread: float = 0.3) -> Tensor:
    """Log-probs near the old ones, as a leaf with gradient, random where the mask is False."""
    rng = torch.Generator().manual_seed(seed)
    assert batch.old_log_probs is not None
    return (batch.old_log_probs + spread * torch.randn(len(batch.tokens), generator=rng)).requires_grad_()


def sample(
    group: str = "g",
    index: int = 0,
    *,
    size: int = 2,
    prompt: Sequence[int] = (5, 6, 7),
    response: Sequence[int] = (21, 22),
    version: int = 1,
    score: float | None = 0.5,
    trained: Sequence[tuple[int, int]] | None = None,
    **fields: Any,
) -> sample_pb2.Sample:
    """A valid scored sample; `score` None is a failure of the scorer. `trained`: (start, length) spans."""
    count = len(response)
    spans = trained if trained is not None else [(0, count)] if count else []
    outcome = (
        rewards.infrastructure_failure("timeout", 3, verifier="t")
        if score is None
        else rewards.score(score, verifier="t")
    )
    defaults: dict[str, Any] = {
        "finish_reason": sample_pb2.FINISH_REASON_STOP,
        "temperature": TEMPERATURE,
        "reward": outcome,
        "admitted_version": version,
        "log_probs": [-0.25 * (i + 1) for i in range(count)],
        "versions": [sample_pb2.VersionSpan(start=0, length=count, version=version)] if count else [],
    }
    return sample_pb2.Sample(
        id=sample_id(group, index),
        group_id=group,
        group_index=index,
        group_size=size,
        prompt_token_ids=prompt,
        response_token_ids=response,
        loss_spans=[sample_pb2.Span(start=start, length=length) for start, length in spans],
        **defaults | fields,
    )
