"""From groups of samples to the record that carries them to a gradient.

`flatten` lays the samples of groups side by side; rewards and advantages are computed on those arrays; `to_batch`
turns them into a `Batch`. Masks come from lengths and spans, never from token values: an end token equal to the
padding token, or in the middle of a prompt, is a token like any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.assembly import Group, Member, oldest_version
from services.trainer.batch import Batch
from trireme.contracts.rewards import reward_value
from trireme.contracts.v1 import sample_pb2

TEMPERATURE_TOLERANCE = 1e-5  # relative; a sample carries its temperature as float32


@dataclass(frozen=True)
class Flat:
    """N samples of several groups, group after group.

    rewards: float64 [N], raw; 0 where not valid. groups: int64 [N], counted from 0. valid, truncated: bool [N].
    response_lengths, trained_tokens: int64 [N], all tokens of the response and those that the model wrote.
    """

    samples: list[sample_pb2.Sample]
    rewards: NDArray[np.float64]
    groups: NDArray[np.int64]
    valid: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    response_lengths: NDArray[np.int64]
    trained_tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.samples)


def flatten(groups: Sequence[Group], policy_failure_score: float) -> Flat:
    """The samples of `groups` side by side; places without a sample are left out.

    policy_failure_score: the reward of an answer that cannot be scored.
    """
    members = [(number, member) for number, group in enumerate(groups) for member in group if member.sample]
    samples = [member.sample for _, member in members if member.sample is not None]
    return Flat(
        samples=samples,
        rewards=np.array([_raw_reward(member, policy_failure_score) for _, member in members], np.float64),
        groups=np.array([number for number, _ in members], np.int64),
        valid=np.array([member.valid for _, member in members], bool),
        truncated=np.array([one.finish_reason == sample_pb2.FINISH_REASON_LENGTH for one in samples], bool),
        response_lengths=np.array([len(one.response_token_ids) for one in samples], np.int64),
        trained_tokens=np.array([sum(span.length for span in one.loss_spans) for one in samples], np.int64),
    )


def _raw_reward(member: Member, policy_failure_score: float) -> float:
    if not member.valid or member.sample is None:
        return 0.0
    value = reward_value(member.sample.reward, policy_failure_score)
    return 0.0 if value is None else value


def to_batch(
    flat: Flat, advantages: NDArray[np.float64], trained: NDArray[np.bool_], version: int, temperature: float
) -> Batch:
    """The sequences of `flat` that carry gradient, in its order.

    advantages: float64 [N]. trained: bool [N], which samples may enter the loss. version: of the weights to update.
    temperature: what the trainer divides logits by. Sequences without a trained token are left out; they would add
    nothing to any sum. The batch may be empty. Raises ValueError naming the sample whose temperature is another,
    whose fields disagree, or whose log-probs are not finite.
    """
    if not temperature > 0:
        raise ValueError(f"policy.generation.temperature must be above 0 to train, got {temperature}")
    chosen = [index for index in range(len(flat)) if trained[index] and flat.trained_tokens[index] > 0]
    samples = [flat.samples[index] for index in chosen]
    for sample in samples:
        _check(sample, temperature)
    masks = [_loss_mask(sample) for sample in samples]
    gains = [float(advantages[index]) for index in chosen]
    return Batch(
        tokens=_joined([_tokens(sample) for sample in samples], torch.int64),
        lengths=_lengths(samples),
        prompt_lengths=torch.tensor([len(one.prompt_token_ids) for one in samples], dtype=torch.int64),
        group=torch.from_numpy(flat.groups[chosen].astype(np.int64)),
        age=torch.tensor([version - oldest_version(one) for one in samples], dtype=torch.int64),
        loss_mask=_joined(masks, torch.bool),
        generation_log_probs=_joined([_log_probs(s, m) for s, m in zip(samples, masks, strict=True)], torch.float32),
        advantages=_joined([m.to(torch.float64) * a for m, a in zip(masks, gains, strict=True)], torch.float32),
    )


def _check(sample: sample_pb2.Sample, temperature: float) -> None:
    count = len(sample.response_token_ids)
    if not sample.prompt_token_ids:
        raise ValueError(f"sample {sample.id}: no prompt token to predict the first response token from")
    if len(sample.log_probs) != count:
        raise ValueError(f"sample {sample.id}: {len(sample.log_probs)} log-probs for {count} response tokens")
    if any(span.start + span.length > count for span in sample.loss_spans):
        raise ValueError(f"sample {sample.id}: a loss span reaches beyond its {count} response tokens")
    if not math.isclose(sample.temperature, temperature, rel_tol=TEMPERATURE_TOLERANCE):
        raise ValueError(
            f"sample {sample.id}: sampled at temperature {sample.temperature:g}, the trainer uses {temperature:g}"
        )


def _tokens(sample: sample_pb2.Sample) -> Tensor:
    return torch.tensor([*sample.prompt_token_ids, *sample.response_token_ids], dtype=torch.int64)


def _lengths(samples: Sequence[sample_pb2.Sample]) -> Tensor:
    return torch.tensor([len(s.prompt_token_ids) + len(s.response_token_ids) for s in samples], dtype=torch.int64)


def _loss_mask(sample: sample_pb2.Sample) -> Tensor:
    """bool [prompt + response]: the response tokens that the model wrote itself."""
    start = len(sample.prompt_token_ids)
    mask = torch.zeros(start + len(sample.response_token_ids), dtype=torch.bool)
    for span in sample.loss_spans:
        mask[start + span.start : start + span.start + span.length] = True
    return mask


def _log_probs(sample: sample_pb2.Sample, mask: Tensor) -> Tensor:
    """float32 [prompt + response]: as sampled, 0 where the mask is False."""
    values = torch.zeros(len(mask))
    values[len(sample.prompt_token_ids) :] = torch.tensor(list(sample.log_probs), dtype=torch.float32)
    values = torch.where(mask, values, 0.0)
    if not torch.isfinite(values).all():
        raise ValueError(f"sample {sample.id}: a log-prob of a trained token is not finite")
    return values


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([part.to(dtype) for part in parts]) if parts else torch.zeros(0, dtype=dtype)
