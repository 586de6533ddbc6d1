"""Weights that correct for the engine having sampled from slightly another distribution than the trainer computes.

w = exp(old - generation), trainer over engine, never differentiated. A log-ratio that is nan or infinite gives
weight 0: a token that one side calls impossible must not be trained on. Bounds are bounds on trainer/engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from services.trainer.objectives.base import Terms, per_token, sequence_means

Truncation = Literal["tis", "icepop", "seq-mask-tis"]
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class Correction:
    """How importance weights are made and bounded.

    truncation None leaves them unbounded. `tis` clamps to [low, high]; `icepop` drops tokens outside of it;
    `seq-mask-tis` drops sequences whose exp(mean log-ratio) is outside, and keeps the weights of the others.
    sequence_level: one weight per sequence, exp of the MEAN log-ratio (the sum tends to 0 with the length).
    Raises ValueError when a truncation has no upper bound or its bounds are in the wrong order.
    """

    truncation: Truncation | None = None
    low: float | None = None
    high: float | None = None
    sequence_level: bool = False

    def __post_init__(self) -> None:
        if self.truncation not in (None, "tis", "icepop", "seq-mask-tis"):
            raise ValueError(
                "loss_fn.truncated_importance_sampling_type must be tis, icepop or seq-mask-tis, "
                f"got {self.truncation!r}"
            )
        if self.truncation is None:
            return
        if self.high is None:
            raise ValueError("loss_fn.truncated_importance_sampling_ratio must be set for a truncation type")
        if self.low is None and self.truncation != "tis":
            raise ValueError(f"loss_fn.truncated_importance_sampling_ratio_min must be set for {self.truncation}")
        if not 0 <= self.minimum <= self.high:
            raise ValueError(
                f"loss_fn.truncated_importance_sampling_ratio_min {self.minimum} must be within 0 and "
                f"truncated_importance_sampling_ratio {self.high}"
            )

    @property
    def minimum(self) -> float:
        return 0.0 if self.low is None else self.low

    @property
    def maximum(self) -> float:
        return float("inf") if self.high is None else self.high


@dataclass(frozen=True)
class Weights:
    """values: float [T], detached, what each token's loss is multiplied by. raw: [T], before any bound.
    outside: bool [T], trained tokens whose weight a bound changed. dropped: of these, those whose weight became 0.
    """

    values: Tensor
    raw: Tensor
    outside: Tensor
    dropped: Tensor


def importance_weights(terms: Terms, correction: Correction) -> Weights:
    """The weights of one micro-batch; 1 is a token whose engine and trainer agree."""
    log_ratio = (terms.old - terms.generation).detach()
    if correction.sequence_level:
        raw = per_token(guarded_exp(sequence_means(log_ratio, terms)), terms)
    else:
        raw = guarded_exp(log_ratio)
    values = _bounded(raw, log_ratio, terms, correction)
    dropped = values == 0.0
    return Weights(values, raw, outside=terms.mask & (dropped | (values != raw)), dropped=terms.mask & dropped)


def guarded_exp(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio within +-20; 0 where it is nan or infinite."""
    finite = torch.isfinite(log_ratio)
    return torch.where(finite, torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)), 0.0)


def _bounded(raw: Tensor, log_ratio: Tensor, terms: Terms, correction: Correction) -> Tensor:
    low, high = correction.minimum, correction.maximum
    if correction.truncation is None:
        return raw
    if correction.truncation == "tis":
        # A weight of 0 says that the token is impossible on one side: no lower bound may revive it.
        return torch.where(raw > 0, raw.clamp(low, high), 0.0)
    judged = raw
    if correction.truncation == "seq-mask-tis":
        judged = per_token(guarded_exp(sequence_means(log_ratio, terms)), terms)
    return torch.where((judged >= low) & (judged <= high), raw, 0.0)
