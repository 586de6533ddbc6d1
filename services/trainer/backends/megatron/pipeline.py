"""Micro-batches through the model's pipeline stages, by Megatron's schedules (1F1B, interleaved where virtual)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from services.trainer.backends.megatron import cpu
from services.trainer.backends.megatron.forward import hidden_states, lay_out, read
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.backends.megatron.settings import Settings
from services.trainer.batch import Batch

# Of a micro-batch's number and its log-probs: the loss to differentiate, or anything where nothing is.
Consume = Callable[[int, Tensor], Tensor]


def run(
    chunks: Sequence[PolicyModel], parts: Sequence[Batch], settings: Settings, consume: Consume, *, train: bool
) -> None:
    """Forward, and backward if `train`, of all `parts`; `consume` is called on the last stage only. Collective."""
    schedule = get_forward_backward_func()
    with cpu.device_literals():
        schedule(
            forward_step_func=partial(_forward_step, settings=settings, consume=consume),
            data_iterator=[iter(list(enumerate(parts))) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(parts),
            seq_length=1,  # of no effect: stages tell each other the shapes of what they send
            micro_batch_size=1,
            forward_only=not train,
        )


def _forward_step(
    parts: Iterator[tuple[int, Batch]], model: PolicyModel, *, settings: Settings, consume: Consume
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Any]]]]:
    number, part = next(parts)
    layout = lay_out(part, settings)

    def loss(states: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        log_probs = read(model, layout, states, len(part.tokens), settings.temperature)
        return consume(number, log_probs), torch.tensor(0, dtype=torch.int), {}

    return hidden_states(model, layout), loss
