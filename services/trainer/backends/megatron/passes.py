"""All micro-batches of a rank through the model: log-probs alone, or gradients of an objective with them.

A rank may have an empty micro-batch where others have one with sequences: it computes one that adds nothing, because
collectives would wait for it otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from services.trainer.backends.base import Objective
from services.trainer.backends.megatron import distributed, forward, pipeline
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.backends.megatron.optimizer import Trainable
from services.trainer.backends.megatron.settings import Settings
from services.trainer.batch import Batch, Normalizer

Totals = dict[str, Tensor]


def log_probs(chunks: Sequence[PolicyModel], batch: Batch, own: Sequence[Tensor], settings: Settings) -> Tensor:
    """float32 [T] of the whole batch, from micro-batches `own` of this rank and those of the others. Collective."""
    result = torch.zeros(len(batch.tokens))

    def keep(number: int, values: Tensor) -> Tensor:
        if len(own[number]):
            result[batch.token_positions(own[number])] = values
        return values.sum()

    parts = [_part(batch, members) for members in own]
    if settings.parallel.pipeline > 1:
        pipeline.run(chunks, parts, settings, keep, train=False)
    else:
        for number, part in enumerate(parts):
            keep(number, forward.log_probs(chunks[0], part, settings))
    return _from_all_ranks(result)


def gradients(
    chunks: Sequence[PolicyModel],
    batch: Batch,
    own: Sequence[Tensor],
    settings: Settings,
    objective: Objective,
    trainable: Trainable,
) -> tuple[dict[str, float], Tensor]:
    """Add the gradients of this rank's micro-batches to its buffers. Collective.

    Returns loss and metrics over all ranks, and the log-probs as `log_probs` does.
    """
    work = _Gradients(batch, own, objective)
    if settings.parallel.pipeline > 1:
        pipeline.run(chunks, work.parts, settings, work.loss, train=True)
    else:
        for number in range(len(own)):
            # Gradients are reduced with the last micro-batch's backward, if they overlap with it at all.
            with nullcontext() if number == len(own) - 1 else trainable.no_sync():
                work.pass_through(number, chunks[0], settings, skip=trainable.may_skip_backward)
    names = sorted(work.totals)
    summed = _from_all_ranks(torch.tensor([float(work.totals[name]) for name in names], dtype=torch.float64))
    return dict(zip(names, summed.tolist(), strict=True)), _from_all_ranks(work.log_probs)


class _Gradients:
    """What accumulates over the micro-batches of a step: loss and metrics (under "loss" and their names), log-probs."""

    def __init__(self, batch: Batch, own: Sequence[Tensor], objective: Objective) -> None:
        self.batch, self.own, self.objective = batch, own, objective
        self.parts = [_part(batch, members) for members in own]
        self.normalizer = batch.normalizer()
        self.log_probs = torch.zeros(len(batch.tokens))
        # Every name is there on ranks too that see no log-probs.
        self.totals = _nothing(batch, objective, self.normalizer)

    def loss(self, number: int, current: Tensor) -> Tensor:
        """Of one micro-batch; its share of the totals is added."""
        if len(self.own[number]):
            self.log_probs[self.batch.token_positions(self.own[number])] = current.detach()
        loss, metrics = self.objective(current, self.parts[number], self.normalizer)
        for name, value in {"loss": loss, **metrics}.items():
            self.totals[name] = self.totals[name] + value.detach()
        return loss

    def pass_through(self, number: int, model: PolicyModel, settings: Settings, skip: bool) -> None:
        """Forward and backward of one micro-batch, the latter only where its gradient is not zero if it may `skip`."""
        if skip and not len(self.own[number]):
            return
        current = forward.log_probs(model, self.parts[number], settings)
        # Differentiated in two halves, because the second may have nothing to do.
        leaf = current.detach().requires_grad_()
        loss = self.loss(number, leaf)
        gradient = torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)[0]
        if gradient.any() or not skip:
            current.backward(gradient)


def _part(batch: Batch, members: Tensor) -> Batch:
    """A micro-batch, or one sequence that adds nothing to any sum."""
    if len(members):
        return batch.select(members)
    one = batch.select(torch.tensor([0]))
    return replace(one, loss_mask=torch.zeros_like(one.loss_mask))


def _nothing(batch: Batch, objective: Objective, normalizer: Normalizer) -> Totals:
    """Zero under every name."""
    masked = _part(batch, torch.tensor([], dtype=torch.int64))
    loss, metrics = objective(torch.zeros(len(masked.tokens)), masked, normalizer)
    return {name: torch.zeros_like(value.detach()) for name, value in {"loss": loss, **metrics}.items()}


def _from_all_ranks(values: Tensor) -> Tensor:
    """Summed over data-parallel ranks and pipeline stages, each of which has zeros where the others have values."""
    for group in (parallel_state.get_pipeline_model_parallel_group(), distributed.data_parallel_group()):
        if group.size() > 1:
            values = values.to("cpu" if dist.get_backend(group) == "gloo" else "cuda")
            dist.all_reduce(values, group=group)
    return values.cpu()
