"""One GRPO step on collected groups: advantages, batch, optimizer steps, and the metrics of all of it.

Synchronous and free of I/O; the loop runs it on the thread that owns the backend.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.trainer.advantages import compute_advantages, statistics
from services.trainer.assembly import Group
from services.trainer.backends.base import Backend, Objective, StepResult
from services.trainer.batch import Batch
from services.trainer.batching import Flat, flatten, to_batch
from services.trainer.mismatch import mismatch
from services.trainer.objectives.build import correction_of
from services.trainer.rewards import trainable, transform
from trireme.config import Config
from trireme.contracts.v1 import sample_pb2


@dataclass(frozen=True)
class Learned:
    """What one step did. rewards: raw, None where masked, aligned with samples. applied: False if skipped for a
    gradient that was not finite, None if there was nothing to train on."""

    metrics: dict[str, float]
    samples: list[sample_pb2.Sample]
    rewards: list[float | None]
    batch: Batch
    applied: bool | None


class Learner:
    """Turns groups into optimizer steps."""

    def __init__(self, config: Config, backend: Backend, objective: Objective) -> None:
        self._config, self._backend, self._objective = config, backend, objective

    def learn(self, groups: Sequence[Group], version: int) -> Learned:
        """Train on `groups` to update weights `version`."""
        started = time.monotonic()
        flat = flatten(groups, self._config.reward.policy_failure_score)
        batch, metrics = self._prepare(flat, version)
        prepared = time.monotonic()
        batch = self._with_stored_log_probs(batch)
        scored = time.monotonic()
        results = [self._backend.step(part, self._objective) for part in self._parts(batch)]
        ended = time.monotonic()
        metrics |= _combine(results) | self._mismatch(batch, results) if results else {}
        metrics |= {
            "train/masked_samples": float(sum(group.size for group in groups) - flat.valid.sum()),
            "timing/train/data_processing": prepared - started,
            "timing/train/policy_and_reference_logprobs": scored - prepared,
            "timing/train/policy_training": ended - scored,
            "train/trained_tokens": float(batch.loss_mask.sum()),
            "train/total_tokens": float(len(batch.tokens)),
            "train/training_tokens_per_s": len(batch.tokens) / (ended - prepared),
        }
        rewards = [float(r) if ok else None for r, ok in zip(flat.rewards, flat.valid, strict=True)]
        applied = all(result.applied for result in results) if results else None
        return Learned(metrics, flat.samples, rewards, batch, applied)

    def _prepare(self, flat: Flat, version: int) -> tuple[Batch, dict[str, float]]:
        grpo = self._config.grpo
        rewards = transform(flat.rewards, flat.response_lengths, grpo)
        advantages = compute_advantages(rewards, flat.groups, flat.valid, grpo)
        trained = trainable(flat.valid, flat.truncated, overlong_filtering=grpo.overlong_filtering)
        batch = to_batch(flat, advantages, trained, version, self._config.policy.generation.temperature)
        found = statistics(rewards, flat.groups, flat.valid, advantages)
        raw = flat.rewards[flat.valid]
        return batch, {
            "train/reward": float(raw.mean()) if len(raw) else float("nan"),
            "train/reward_std": found.reward_std,
            "train/shaped_reward": found.reward_mean,
            "train/zero_variance_fraction": found.zero_variance_fraction,
            "train/advantage_min": found.advantage_min,
            "train/advantage_max": found.advantage_max,
            "train/truncated_fraction": float(flat.truncated.mean()) if len(flat) else 0.0,
            "train/mean_gen_tokens_per_sample": float(flat.response_lengths.mean()) if len(flat) else 0.0,
        }

    def _with_stored_log_probs(self, batch: Batch) -> Batch:
        """`old` needs a pass of its own only when several optimizer steps share a batch; else it is the current one."""
        several = self._config.grpo.samples_per_step > self._config.policy.train_global_batch_size
        reference = self._config.loss_fn.reference_policy_kl_penalty > 0
        return batch.with_log_probs(
            old=self._backend.log_probs(batch) if several and len(batch) else None,
            reference=self._backend.log_probs(batch, "reference") if reference and len(batch) else None,
        )

    def _parts(self, batch: Batch) -> list[Batch]:
        """One part per optimizer step, in order, of at most train_global_batch_size sequences; none for an empty batch.

        Parts are as equal as can be: where samples are masked, none is left with a few, which would count as much.
        """
        if len(batch) == 0:  # every sample is masked; an optimizer step would still move weights by its momentum
            return []
        steps = -(-len(batch) // self._config.policy.train_global_batch_size)
        return [batch.select(part) for part in torch.arange(len(batch)).tensor_split(steps)]

    def _mismatch(self, batch: Batch, results: Sequence[StepResult]) -> dict[str, float]:
        """Engine against trainer, both under the weights before the first update."""
        first = torch.cat([result.log_probs for result in results])
        trainer = first if batch.old_log_probs is None else batch.old_log_probs
        found = mismatch(trainer, batch, correction_of(self._config.loss_fn))
        return {f"train/{name}": value for name, value in found.items()}


def _combine(results: Sequence[StepResult]) -> dict[str, float]:
    """Metrics of several optimizer steps as their mean; a count of those skipped."""
    names = sorted({name for result in results for name in result.metrics})
    metrics = {
        f"train/{name}": float(np.mean([result.metrics[name] for result in results if name in result.metrics]))
        for name in names
    }
    return metrics | {
        "train/loss": float(np.mean([result.loss for result in results])),
        "train/grad_norm": float(np.mean([result.grad_norm for result in results])),
        "train/lr": results[-1].learning_rate,
        "train/skipped_steps": float(sum(not result.applied for result in results)),
    }
