"""Log-probabilities of chosen tokens from hidden states, without ever holding the logits of all of them.

The vocabulary (49,152 words for the smallest model here) makes logits the largest tensor of a step. They are made a
chunk of tokens at a time; what the backward pass needs of them is kept while it fits a budget, recomputed otherwise.
Written over a vocabulary shard: with a tensor-parallel group, the reductions marked below run over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Float32 elements of log-probs: one chunk's, and those kept for the backward pass of a micro-batch.
CHUNK_ELEMENTS = 1 << 25
KEEP_ELEMENTS = 1 << 28


@dataclass(frozen=True)
class Head:
    """weight: [vocabulary shard, hidden], its first row being word `first`; group: those who hold the other shards.

    padding: rows at the shard's end that are no words and get no probability. fused: add the weight's gradient to
    Megatron's `main_grad` directly.
    """

    weight: Tensor
    temperature: float
    first: int = 0
    group: dist.ProcessGroup | None = None
    fused: bool = False
    padding: int = 0


def token_log_probs(hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """float32 [M] log-softmax(hidden @ weight.T / temperature)[targets]. hidden: [M, hidden], targets: int64 [M]."""
    if torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad):
        return _TokenLogProbs.apply(hidden, head.weight, targets, head)
    parts = [_chunk(hidden[rows], targets[rows], head)[0] for rows in _chunks(len(hidden), head)]
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)


def _chunks(count: int, head: Head) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // len(head.weight))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _reduce(value: Tensor, head: Head, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if head.group is not None and head.group.size() > 1:
        dist.all_reduce(value, op=op, group=head.group)
    return value


def _local_targets(targets: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Row of each target in this shard (0 where it is elsewhere), and whether it is here."""
    local = targets - head.first
    here = (local >= 0) & (local < len(head.weight))
    return torch.where(here, local, 0), here


def _chunk(hidden: Tensor, targets: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """log-probs of the targets [C], and of this shard's words [C, V], float32."""
    logits = (hidden @ head.weight.t()).float()
    if head.temperature != 1:
        logits.div_(head.temperature)
    if head.padding:
        logits[:, -head.padding :] = -torch.inf
    rows, here = _local_targets(targets, head)
    if head.group is None or head.group.size() == 1:
        words = logits.log_softmax(-1)
        return words.gather(1, rows[:, None])[:, 0], words
    top = _reduce(logits.amax(-1, keepdim=True), head, dist.ReduceOp.MAX)
    total = _reduce(logits.sub(top).exp_().sum(-1, keepdim=True), head)
    words = logits.sub_(top + total.log())
    return _reduce(torch.where(here, words.gather(1, rows[:, None])[:, 0], 0), head), words


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: Head) -> Tensor:
        ctx.head, ctx.kept, outputs = head, {}, []
        keep = max(1, KEEP_ELEMENTS // len(weight))
        for rows in _chunks(len(hidden), head):
            log_probs, words = _chunk(hidden[rows], targets[rows], head)
            outputs.append(log_probs)
            if rows.stop <= keep:
                ctx.kept[rows.start] = words
        ctx.save_for_backward(hidden, weight, targets)
        return torch.cat(outputs) if outputs else hidden.new_zeros(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        head, grad_hidden = ctx.head, torch.empty_like(hidden)
        into = weight.main_grad if head.fused else torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(len(hidden), head):
            words = ctx.kept.pop(rows.start, None)
            if words is None:
                words = _chunk(hidden[rows], targets[rows], head)[1]
            grad_logits = _grad_logits(words.exp_(), targets[rows], grad[rows], head).to(weight.dtype)
            grad_hidden[rows] = grad_logits @ weight
            _accumulate(into, grad_logits, hidden[rows])
        _reduce(grad_hidden, head)
        return grad_hidden, None if head.fused else into.to(weight.dtype), None, None


def _grad_logits(probabilities: Tensor, targets: Tensor, grad: Tensor, head: Head) -> Tensor:
    """[C, V], in place: d log p(target) / d logit = (1 at the target) - probability, over the temperature."""
    scaled = (grad / head.temperature)[:, None]
    rows, here = _local_targets(targets, head)
    return probabilities.mul_(-scaled).scatter_add_(1, rows[:, None], scaled * here[:, None])


def _accumulate(into: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    if into.dtype == hidden.dtype:
        into.addmm_(grad_logits.t(), hidden)
    else:
        into.add_(grad_logits.t() @ hidden)
