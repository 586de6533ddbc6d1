"""Core attention of packed sequences without Transformer Engine: rotary embedding and softmax, segment by segment.

Segments of about the same size are stacked into blocks, padded at their end (a causal mask hides that), and one
kernel call serves each block in every layer. Where a segment has a prefix, its block has a mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from services.trainer.backends.megatron.layout import Segment

# Stacking may waste this much of a block on padding: a kernel call costs more than that for short segments.
MAX_WASTE = 1.5
SMALL_BLOCK = 1 << 16


@dataclass(frozen=True)
class Block:
    """B segments. queries: int64 [B, Lq], rows of this rank; keys: int64 [B, Lk], rows of all ranks; mask: bool
    [B or 1, 1, Lq, Lk], True where a query sees a key, or None for a causal one; window_mask: that of layers with
    sliding-window attention."""

    queries: Tensor
    keys: Tensor
    mask: Tensor | None
    window_mask: Tensor | None


@dataclass(frozen=True)
class Plan:
    """blocks, and order: int64 [P], where in the blocks' concatenated queries each of this rank's rows is."""

    blocks: tuple[Block, ...]
    order: Tensor


@dataclass(frozen=True)
class Angles:
    """Of rotary embedding: cos, sin: [P, 1, D/2]."""

    cos: Tensor
    sin: Tensor


@dataclass
class PlannedSeqParams(PackedSeqParams):
    """Megatron's packed-sequence parameters with what this attention needs beside them. angles: of this rank's rows;
    window_angles: in layers with sliding-window attention. group: the ranks that share the sequences."""

    plan: Plan | None = None
    angles: Angles | None = None
    window_angles: Angles | None = None
    group: dist.ProcessGroup | None = None


def make_plan(segments: Sequence[Segment], where: Tensor | None = None, window: int | None = None) -> Plan:
    """The blocks for `segments`, which cover this rank's rows in order. where: the key's row of each position in the
    layout, when that is another. window: tokens that a query sees, itself included, where layers have such a limit."""
    firsts = torch.tensor([0, *(segment.length for segment in segments)]).cumsum(0).tolist()
    row_of = {id(segment): first for segment, first in zip(segments, firsts[:-1], strict=True)}
    blocks, rows = [], []
    for members in _stacks(segments):
        block, valid = _block(members, [row_of[id(segment)] for segment in members], where, window)
        blocks.append(block)
        # Padding goes behind the end, where the sort below leaves it.
        rows.append(torch.where(valid, block.queries, torch.iinfo(torch.int64).max).flatten())
    total = sum(segment.length for segment in segments)
    return Plan(tuple(blocks), torch.cat(rows).argsort(stable=True)[:total])


def _stacks(segments: Sequence[Segment]) -> Iterable[list[Segment]]:
    """Lists of segments that are worth stacking."""
    stack: list[Segment] = []
    for segment in sorted(segments, key=lambda s: (s.prefix_length > 0, s.length, s.prefix_length)):
        if stack and not _fits([*stack, segment]):
            yield stack
            stack = []
        stack.append(segment)
    yield stack


def _fits(stack: list[Segment]) -> bool:
    if (stack[0].prefix_length > 0) != (stack[-1].prefix_length > 0):
        return False
    queries, prefix = max(s.length for s in stack), max(s.prefix_length for s in stack)
    padded = len(stack) * queries * (queries + prefix)
    return padded <= max(SMALL_BLOCK, MAX_WASTE * sum(s.length * (s.length + s.prefix_length) for s in stack))


def _block(stack: list[Segment], rows: list[int], where: Tensor | None, window: int | None) -> tuple[Block, Tensor]:
    """The block of `stack`, whose queries begin at `rows`, and bool [B, Lq]: which of its queries are not padding."""
    start, length = _column(s.start for s in stack), _column(s.length for s in stack)
    prefix_start, prefix_length = _column(s.prefix_start for s in stack), _column(s.prefix_length for s in stack)
    offsets, before = torch.arange(int(length.max())), torch.arange(int(prefix_length.max()))
    inside = offsets.clamp(max=length - 1)
    keys, mask = start + inside, None
    if len(before):
        prefix = prefix_start + before.clamp(max=prefix_length - 1).clamp(min=0)
        keys, mask = torch.cat([prefix, keys], 1), _mask(before, offsets, prefix_length)
    narrow = window is not None and len(before) + len(offsets) > window
    window_mask = _mask(before, offsets, prefix_length, window) if narrow else mask
    return Block(_column(rows) + inside, keys if where is None else where[keys], mask, window_mask), offsets < length


def _column(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values)).unsqueeze(1)


def _mask(before: Tensor, offsets: Tensor, prefix_length: Tensor, window: int | None = None) -> Tensor:
    count, queries = len(prefix_length), len(offsets)
    if (prefix_length == len(before)).all():
        count, prefix_length = 1, prefix_length[:1]
    prefix = (before < prefix_length).unsqueeze(1).expand(count, queries, len(before))
    behind = offsets.unsqueeze(1) - offsets.unsqueeze(0)  # of a key, in tokens
    causal = behind >= 0
    if window is not None:
        prefix = prefix & ((prefix_length + offsets).unsqueeze(2) - before < window)
        causal = causal & (behind < window)
    return torch.cat([prefix, causal.expand(count, queries, queries)], 2).unsqueeze(1)


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotary embedding of x: [P, H, D], halves rotated against each other."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos, angles.sin
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class PlannedAttention(nn.Module):
    """Megatron's core attention for `PlannedSeqParams`; the arguments that it does not name are Megatron's.

    windowed: this layer has sliding-window attention.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, windowed: bool = False, **_: Any) -> None:
        super().__init__()
        self.windowed = windowed
        self.scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PlannedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """query: [P, heads, D]; key, value: [P, KV heads, D]; returns [P, heads * D]. P: this rank's rows."""
        if packed_seq_params is None or packed_seq_params.plan is None or packed_seq_params.angles is None:
            raise ValueError("this attention takes packed sequences only")
        plan = packed_seq_params.plan
        angles = packed_seq_params.window_angles if self.windowed else packed_seq_params.angles
        assert angles is not None
        query, key = rotate(query, angles), rotate(key, angles)
        group = packed_seq_params.group
        if group is not None and group.size() > 1:
            # Every query may see keys of every rank; their gradients are summed where they came from.
            key, value = (gather_from_sequence_parallel_region(each, group=group) for each in (key, value))
        rows = [self._attend(query, key, value, block) for block in plan.blocks]
        return torch.cat(rows).index_select(0, plan.order)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> Tensor:
        """[B * Lq, heads * D]"""
        shape = block.queries.shape
        q = query.index_select(0, block.queries.flatten()).unflatten(0, shape).transpose(1, 2)
        k = key.index_select(0, block.keys.flatten()).unflatten(0, block.keys.shape).transpose(1, 2)
        v = value.index_select(0, block.keys.flatten()).unflatten(0, block.keys.shape).transpose(1, 2)
        mask = block.window_mask if self.windowed else block.mask
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(shape[0] * shape[1], -1)
