"""What every objective is made of: the terms of one micro-batch, and sums that are divided once, globally.

Every reduction here sums over the micro-batch and divides by the `Normalizer` of the whole global batch. Losses and
metrics of micro-batches and ranks therefore add up to those of the global batch, however it was cut; a micro-batch
without a trained token contributes 0 and a gradient of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.trainer.batch import Batch, Normalizer

Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class Terms:
    """One micro-batch on the device of its log-probs, all float32 [T] and 0 where the mask is False.

    Untrained positions are zeroed before any arithmetic, so that nothing in them, not even inf or nan, reaches a
    value or a gradient. old is detached, and is the current log-prob itself when the batch stores none.
    mask: bool [T]. sequence: int64 [T], the sequence of each token. sequences: N.
    """

    log_probs: Tensor
    old: Tensor
    generation: Tensor
    reference: Tensor | None
    advantages: Tensor
    mask: Tensor
    sequence: Tensor
    sequences: int

    @classmethod
    def of(cls, log_probs: Tensor, batch: Batch, *, on_policy: bool = False) -> Terms:
        """log_probs: [T] with gradient, aligned with the batch. on_policy: take the current log-probs for the old."""
        device = log_probs.device
        mask = batch.loss_mask.to(device)

        def clean(values: Tensor) -> Tensor:
            return torch.where(mask, values.to(device, torch.float32), 0.0)

        current = clean(log_probs)
        stored = None if on_policy else batch.old_log_probs
        return cls(
            log_probs=current,
            old=(current if stored is None else clean(stored)).detach(),
            generation=clean(batch.generation_log_probs),
            reference=None if batch.reference_log_probs is None else clean(batch.reference_log_probs),
            advantages=clean(batch.advantages),
            mask=mask,
            sequence=batch.sequence_index.to(device),
            sequences=len(batch),
        )


def sequence_sums(values: Tensor, terms: Terms) -> Tensor:
    """[N]: the sum of [T] values over the trained tokens of each sequence."""
    masked = torch.where(terms.mask, values, 0.0)
    return torch.zeros(terms.sequences, dtype=values.dtype, device=values.device).index_add(0, terms.sequence, masked)


def sequence_means(values: Tensor, terms: Terms) -> Tensor:
    """[N]: the mean of [T] values over the trained tokens of each sequence; 0 for one without any."""
    counts = sequence_sums(torch.ones_like(values), terms)
    return sequence_sums(values, terms) / counts.clamp(min=1.0)


def per_token(values: Tensor, terms: Terms) -> Tensor:
    """[T]: each sequence's value of [N] at all of its tokens."""
    return values[terms.sequence]


class Reduction(Protocol):
    """From losses per token [T] to this micro-batch's share of the global loss."""

    def __call__(self, values: Tensor, terms: Terms, normalizer: Normalizer) -> Tensor: ...


def token_mean(values: Tensor, terms: Terms, normalizer: Normalizer) -> Tensor:
    """Every trained token of the global batch counts equally."""
    return torch.where(terms.mask, values, 0.0).sum() / normalizer.tokens


def seq_mean_token_mean(values: Tensor, terms: Terms, normalizer: Normalizer) -> Tensor:
    """Every sequence counts equally, and within it every token."""
    return sequence_means(values, terms).sum() / normalizer.sequences


def seq_mean_token_sum(values: Tensor, terms: Terms, normalizer: Normalizer) -> Tensor:
    """The mean over sequences of the sum over their tokens."""
    return sequence_sums(values, terms).sum() / normalizer.sequences


@dataclass(frozen=True)
class ConstantLength:
    """Dr. GRPO: the sum over tokens divided by one length for all sequences, so that none gains from its length."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"the constant length must be at least 1 token, got {self.length}")

    def __call__(self, values: Tensor, terms: Terms, normalizer: Normalizer) -> Tensor:
        return seq_mean_token_sum(values, terms, normalizer) / self.length
