"""The record that carries samples to a gradient: sequences laid back to back, never padded.

Alignment, everywhere in the trainer: a per-token value at position `t` belongs to token `t` itself, so the
log-probability at `t` is that of token `t` given the tokens before it in its sequence. The first token of a
sequence has none (0, and its loss mask is False). Nobody outside a backend shifts by one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

PER_TOKEN = (
    "tokens",
    "loss_mask",
    "generation_log_probs",
    "advantages",
    "old_log_probs",
    "reference_log_probs",
)


@dataclass(frozen=True)
class Batch:
    """N sequences (prompt then response) of T tokens in all.

    tokens: int64 [T]. lengths, prompt_lengths: int64 [N]. group: int64 [N]; sequences of one group share their
    prompt tokens exactly. age: int64 [N], weight versions between sampling and training.
    loss_mask: bool [T], True on tokens that the model sampled and that may carry gradient.
    generation_log_probs, advantages: float32 [T], 0 where loss_mask is False.
    old_log_probs: float32 [T] or None (then the objective takes the current ones, detached).
    reference_log_probs: float32 [T] or None.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    group: Tensor
    age: Tensor
    loss_mask: Tensor
    generation_log_probs: Tensor
    advantages: Tensor
    old_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> Tensor:
        """int64 [N]: where each sequence begins in the per-token fields."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def sequence_index(self) -> Tensor:
        """int64 [T]: the sequence that each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    def token_positions(self, sequences: Tensor) -> Tensor:
        """int64: positions in the per-token fields of all tokens of `sequences`, in that order."""
        starts, lengths = self.starts[sequences], self.lengths[sequences]
        offsets = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        return torch.repeat_interleave(starts, lengths) + offsets

    def select(self, sequences: Tensor) -> Batch:
        """The batch of the given sequences, in the given order."""
        positions = self.token_positions(sequences)
        picked: dict[str, Tensor | None] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            picked[field.name] = None if value is None else value[positions if field.name in PER_TOKEN else sequences]
        return Batch(**picked)  # type: ignore[arg-type]

    def with_log_probs(self, *, old: Tensor | None = None, reference: Tensor | None = None) -> Batch:
        """The same batch with stored log-probs of the policy before its update and of the reference."""
        return replace(
            self,
            old_log_probs=self.old_log_probs if old is None else old,
            reference_log_probs=self.reference_log_probs if reference is None else reference,
        )

    def normalizer(self) -> Normalizer:
        """The divisors of a loss over this whole batch, at least 1 so that an empty one gives 0."""
        trained = torch.zeros(len(self)).index_add(0, self.sequence_index, self.loss_mask.float()) > 0
        return Normalizer(tokens=max(1, int(self.loss_mask.sum())), sequences=max(1, int(trained.sum())))


@dataclass(frozen=True)
class Normalizer:
    """What a loss is divided by, once, for the whole global batch: its trained tokens or sequences."""

    tokens: int
    sequences: int


def to_bytes(batch: Batch) -> bytes:
    """The batch as safetensors bytes, to send to other ranks without pickle."""
    from safetensors.torch import save

    return save({f.name: getattr(batch, f.name) for f in fields(batch) if getattr(batch, f.name) is not None})


def from_bytes(data: bytes) -> Batch:
    """Inverse of `to_bytes`."""
    from safetensors.torch import load

    return Batch(**load(data))
