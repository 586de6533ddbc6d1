"""CISPO (MiniMax-M1): the clipped ratio weights the gradient of the log-prob, and never cuts it off."""

from __future__ import annotations

from torch import Tensor

from services.trainer.objectives.base import Metrics, Terms
from services.trainer.objectives.clipped import Clip, policy_ratio, ratio_metrics


def cispo_loss(terms: Terms, clip: Clip) -> tuple[Tensor, Metrics]:
    """([T] losses, [T] metrics): -A sg(clip(r)) lp. Every token keeps a gradient, its weight alone is bounded."""
    ratio = policy_ratio(terms)
    held = clip(ratio)
    losses = -terms.advantages * held.detach() * terms.log_probs
    metrics = ratio_metrics(ratio, held, clip, terms.advantages)
    return losses, metrics
