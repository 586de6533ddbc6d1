"""From the `loss_fn` block to the objective that a backend steps on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.backends.base import Objective
from services.trainer.batch import Batch, Normalizer
from services.trainer.corrections import Correction, guarded_exp, importance_weights
from services.trainer.objectives.base import Metrics, Reduction, Terms, seq_mean_token_mean, token_mean
from services.trainer.objectives.cispo import cispo_loss
from services.trainer.objectives.clipped import Clip, clipped_loss, reinforce_loss
from services.trainer.objectives.kl import kl_penalty
from trireme.config.blocks.loss_fn import LossConfig


def build_objective(loss_fn: LossConfig, reduction: Reduction | None = None) -> Objective:
    """The objective that `loss_fn` describes. `reduction` replaces the one that token_level_loss chooses.

    Raises ValueError for combinations that have no meaning, naming the keys.
    """
    _check(loss_fn)
    return PolicyObjective(
        loss_fn=loss_fn,
        clip=Clip(loss_fn.ratio_clip_min, loss_fn.ratio_clip_max, loss_fn.ratio_clip_c),
        correction=correction_of(loss_fn),
        reduction=reduction or (token_mean if loss_fn.token_level_loss else seq_mean_token_mean),
    )


def correction_of(loss_fn: LossConfig) -> Correction:
    """The correction that `loss_fn` describes, whether or not it is switched on (it is always measured)."""
    return Correction(
        truncation=loss_fn.truncated_importance_sampling_type if loss_fn.use_importance_sampling_correction else None,
        low=loss_fn.truncated_importance_sampling_ratio_min,
        high=loss_fn.truncated_importance_sampling_ratio,
        sequence_level=loss_fn.sequence_level_importance_ratios,
    )


@dataclass(frozen=True)
class PolicyObjective:
    """A policy loss, weighted by the correction, plus the penalty for leaving the reference. An `Objective`."""

    loss_fn: LossConfig
    clip: Clip
    correction: Correction
    reduction: Reduction

    def __call__(self, log_probs: Tensor, batch: Batch, normalizer: Normalizer) -> tuple[Tensor, Metrics]:
        """log_probs: [T] with gradient. Loss and metrics are shares of the global batch's; they add up.

        Metrics, by NeMo-RL's names: probs_ratio, probs_ratio_clamped, sampling_importance_ratio (before bounds),
        is_oob_ratio (weights that a bound changed), approx_entropy as means over tokens (over sequences for
        sequence-level ratios); policy_loss and kl_penalty (without its factor) reduced as the loss is;
        clip_fraction_low and clip_fraction_high.
        """
        terms = Terms.of(log_probs, batch, on_policy=self.loss_fn.force_on_policy_ratio)
        losses, measured = self._policy(terms)
        losses, of_correction = self._corrected(losses, terms)
        penalty, of_penalty = self._penalty(terms)
        loss = self.reduction(losses + penalty, terms, normalizer)
        measured |= of_correction | {"approx_entropy": _entropy(terms)}
        mean = seq_mean_token_mean if self.correction.sequence_level else token_mean
        metrics = {name: mean(value, terms, normalizer) for name, value in measured.items()}
        of_loss = of_penalty | {"policy_loss": losses.detach()}
        return loss, metrics | {name: self.reduction(value, terms, normalizer) for name, value in of_loss.items()}

    def _policy(self, terms: Terms) -> tuple[Tensor, Metrics]:
        if self.loss_fn.use_cispo:
            return cispo_loss(terms, self.clip)
        if self.loss_fn.disable_ppo_ratio:
            return reinforce_loss(terms)
        return clipped_loss(terms, self.clip, sequence_level=self.loss_fn.sequence_level_importance_ratios)

    def _corrected(self, losses: Tensor, terms: Terms) -> tuple[Tensor, Metrics]:
        weights = importance_weights(terms, self.correction)
        metrics = {"sampling_importance_ratio": weights.raw}
        if not self.loss_fn.use_importance_sampling_correction:
            return losses, metrics
        return losses * weights.values, metrics | {"is_oob_ratio": weights.outside.float()}

    def _penalty(self, terms: Terms) -> tuple[Tensor, Metrics]:
        beta = self.loss_fn.reference_policy_kl_penalty
        if beta == 0:
            return torch.zeros_like(terms.log_probs), {}
        if terms.reference is None:
            raise ValueError("loss_fn.reference_policy_kl_penalty is not 0 but the batch has no reference log-probs")
        penalty = kl_penalty(terms.log_probs, terms.reference, self.loss_fn.reference_policy_kl_type)
        if self.loss_fn.use_on_policy_kl_approximation:
            penalty = penalty * guarded_exp((terms.log_probs - terms.generation).detach())
        return beta * penalty, {"kl_penalty": penalty.detach()}


def _entropy(terms: Terms) -> Tensor:
    """[T]: -p/q log p of tokens drawn from q, whose mean estimates the policy's entropy."""
    current = terms.log_probs.detach()
    return -guarded_exp(current - terms.generation) * current


def _check(loss_fn: LossConfig) -> None:
    others = {
        "ratio_clip_c": loss_fn.ratio_clip_c is not None,
        "disable_ppo_ratio": loss_fn.disable_ppo_ratio,
        "sequence_level_importance_ratios": loss_fn.sequence_level_importance_ratios,
    }
    clash = [name for name, given in others.items() if given]
    if loss_fn.use_cispo and clash:
        raise ValueError(f"loss_fn.use_cispo excludes {', '.join(clash)}")
    if loss_fn.sequence_level_importance_ratios and loss_fn.token_level_loss:
        raise ValueError("loss_fn.sequence_level_importance_ratios needs token_level_loss: false")
    if loss_fn.truncated_importance_sampling_type and not loss_fn.use_importance_sampling_correction:
        raise ValueError("loss_fn.truncated_importance_sampling_type needs use_importance_sampling_correction: true")
