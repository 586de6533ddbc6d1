"""How a micro-batch is shared over context-parallel ranks. Pure.

Each segment is cut into twice as many chunks as there are ranks; a rank has the one of its number and the one as far
from the end: with a causal mask early chunks are cheap and late ones dear, so all ranks have the same work. It is the
order that Transformer Engine's attention expects.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.backends.megatron.layout import Layout, Segment


@dataclass(frozen=True)
class Part:
    """What one of several ranks computes of a layout of P tokens.

    rows: int64 [P / ranks], positions in the layout. pieces: segments that cover the rows in order, in positions of
    the layout. where: int64 [P], the place of each layout position among the rows of all ranks, laid end to end.
    """

    rows: Tensor
    pieces: tuple[Segment, ...]
    where: Tensor

    def local(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the layout `positions` are this rank's (bool), and in which of its rows those are."""
        mine = torch.full((len(self.where),), -1, dtype=torch.int64)
        mine[self.rows] = torch.arange(len(self.rows))
        found = mine[positions]
        return found >= 0, found[found >= 0]


def part_of(layout: Layout, rank: int, ranks: int) -> Part:
    """The part of `rank`. Raises ValueError for segments that cannot be cut evenly, or that have a prefix."""
    if ranks == 1:
        everything = torch.arange(len(layout))
        return Part(everything, layout.segments, everything)
    pieces = [_pieces(layout, each, ranks) for each in range(ranks)]
    rows = [torch.cat([torch.arange(one.start, one.start + one.length) for one in each]) for each in pieces]
    where = torch.empty(len(layout), dtype=torch.int64)
    where[torch.cat(rows)] = torch.arange(len(layout))
    return Part(rows[rank], tuple(pieces[rank]), where)


def _pieces(layout: Layout, rank: int, ranks: int) -> list[Segment]:
    found = []
    for segment in layout.segments:
        if segment.length % (2 * ranks) or segment.prefix_length:
            raise ValueError(f"{segment} cannot be shared over {ranks} context-parallel ranks")
        length = segment.length // (2 * ranks)
        for chunk in (rank, 2 * ranks - 1 - rank):
            before = chunk * length
            found.append(Segment(segment.start + before, length, segment.start, before))
    return found
