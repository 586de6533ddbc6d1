"""The Backend port: a model that computes log-probs and takes optimizer steps, whatever parallelism is inside.

Implemented by `megatron/` (Megatron-Core). Every method is collective: all ranks
call it with the same arguments, in the same order, and get the same result unless a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from services.trainer.batch import Batch, Normalizer

Metrics = dict[str, float]
# (log_probs [T] with gradient, micro-batch, normalizer of the global batch) -> (loss, metrics).
# Loss and metrics are already divided by the global normalizer: over micro-batches and ranks they add up.
Objective = Callable[[Tensor, Batch, Normalizer], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    loss, metrics: over the global batch. grad_norm: before clipping. log_probs: float32 [T], the policy's before the
    update, aligned with the batch given. applied: False when the step was skipped for a non-finite gradient.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    log_probs: Tensor
    metrics: Metrics
    applied: bool


class Backend(Protocol):
    """A policy (and optionally a frozen reference) under training."""

    def log_probs(self, batch: Batch, which: Literal["policy", "reference"] = "policy") -> Tensor:
        """float32 [T] without gradient, in eval mode; logits are divided by the sampling temperature first."""
        ...

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        """One optimizer step on the whole of `batch`, in as many micro-batches as the configuration asks."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The policy under Hugging Face names, one full tensor at a time, on CPU, in the precision of its training;
        valid until the next is asked for. Meaningful on rank 0; the other ranks must exhaust it too."""
        ...

    def save(self, directory: Path) -> Future[None]:
        """Write weights, optimizer, scheduler and RNG, as they are now, into an existing empty folder.

        The future ends once they are durable, or with OSError; it may run while further calls are made.
        """
        ...

    def restore(self, directory: Path) -> None:
        """Inverse of `save`, under any layout. Raises ValueError naming what is wrong before changing anything."""
        ...
