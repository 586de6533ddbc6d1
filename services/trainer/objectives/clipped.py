"""Clipped policy gradient (PPO, GRPO, DAPO's asymmetric clip, dual clip), at token or sequence level (GSPO), and
plain REINFORCE as the member of the family without a ratio."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.objectives.base import Metrics, Terms, per_token, sequence_means

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class Clip:
    """The ratio is kept within [1 - low, 1 + high]; `dual`, if given, bounds the loss of A < 0 at -A * dual."""

    low: float
    high: float
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.low < 0 or self.high < 0:
            raise ValueError(f"loss_fn.ratio_clip_min {self.low} and ratio_clip_max {self.high} must not be negative")
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"loss_fn.ratio_clip_c must be above 1, got {self.dual}")

    def __call__(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(1 - self.low, 1 + self.high)


def policy_ratio(terms: Terms, *, sequence_level: bool = False) -> Tensor:
    """[T]: exp(lp - old), or at every token of a sequence exp(mean over its tokens of lp - old).

    The log-ratio is held within +-20, so that an overflow never meets an advantage of 0.
    """
    log_ratio = terms.log_probs - terms.old
    if sequence_level:
        log_ratio = per_token(sequence_means(log_ratio, terms), terms)
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def clipped_loss(terms: Terms, clip: Clip, *, sequence_level: bool = False) -> tuple[Tensor, Metrics]:
    """([T] losses, [T] metrics): max(-A r, -A clip(r)), for A < 0 at most -A * dual.

    The maximum takes the pessimistic side: a ratio that moved too far in the direction the advantage asks for has no
    gradient, one that moved too far the other way keeps it. Without a bound the latter is unlimited for A < 0.
    """
    ratio = policy_ratio(terms, sequence_level=sequence_level)
    held = clip(ratio)
    unclipped, clipped = -terms.advantages * ratio, -terms.advantages * held
    losses = torch.maximum(unclipped, clipped)
    if clip.dual is not None:
        bounded = torch.minimum(losses, -terms.advantages * clip.dual)
        losses = torch.where(terms.advantages < 0, bounded, losses)
    return losses, ratio_metrics(ratio, held, clip, terms.advantages)


def reinforce_loss(terms: Terms) -> tuple[Tensor, Metrics]:
    """([T] losses, no metrics): -A lp."""
    return -terms.advantages * terms.log_probs, {}


def ratio_metrics(ratio: Tensor, held: Tensor, clip: Clip, advantages: Tensor) -> Metrics:
    """[T] each. clip_fraction_low and _high count ratios whose gradient the clip took away."""
    ratio, held = ratio.detach(), held.detach()
    return {
        "probs_ratio": ratio,
        "probs_ratio_clamped": held,
        "clip_fraction_low": ((ratio < 1 - clip.low) & (advantages < 0)).float(),
        "clip_fraction_high": ((ratio > 1 + clip.high) & (advantages > 0)).float(),
    }
