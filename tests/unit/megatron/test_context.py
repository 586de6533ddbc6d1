"""Sharing a micro-batch over context-parallel ranks, against the definition."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

from services.trainer.backends.megatron.context import part_of
from services.trainer.backends.megatron.layout import Layout, Segment

NOTHING = torch.zeros(0, dtype=torch.int64)


def layout(*lengths: int) -> Layout:
    segments, start = [], 0
    for length in lengths:
        segments.append(Segment(start, length))
        start += length
    return Layout(torch.arange(start), torch.arange(start), tuple(segments), NOTHING, NOTHING, NOTHING)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_row_is_somebodys_and_found_again(ranks: int) -> None:
    whole = layout(2 * ranks, 6 * ranks, 2 * ranks)
    parts = [part_of(whole, rank, ranks) for rank in range(ranks)]
    laid_end_to_end = torch.cat([part.rows for part in parts])
    assert laid_end_to_end.sort().values.tolist() == list(range(len(whole)))
    for part in parts:
        assert torch.equal(laid_end_to_end[part.where], torch.arange(len(whole)))
        assert len(part.rows) == len(whole) // ranks
        mine, rows = part.local(torch.arange(len(whole)))
        assert torch.equal(part.rows[rows], torch.arange(len(whole))[mine])


def test_a_rank_has_the_chunks_of_its_number_from_both_ends() -> None:
    part = part_of(layout(8, 4), 1, 2)
    assert part.rows.tolist() == [2, 3, 4, 5, 9, 10]
    assert part.pieces == (Segment(2, 2, 0, 2), Segment(4, 2, 0, 4), Segment(9, 1, 8, 1), Segment(10, 1, 8, 2))


def test_all_ranks_have_the_same_causal_work() -> None:
    whole = layout(24, 48)
    work = [
        sum(piece.length * piece.prefix_length + piece.length * (piece.length + 1) // 2 for piece in each.pieces)
        for each in (part_of(whole, rank, 4) for rank in range(4))
    ]
    assert len(set(work)) == 1


@pytest.mark.parametrize("segments", [(Segment(0, 6),), (Segment(0, 4), Segment(4, 4, 0, 4))])
def test_what_cannot_be_shared_is_refused(segments: tuple[Segment, ...]) -> None:
    count = sum(segment.length for segment in segments)
    bad = Layout(torch.arange(count), torch.arange(count), segments, NOTHING, NOTHING, NOTHING)
    with pytest.raises(ValueError, match="cannot be shared over 2 context-parallel ranks"):
        part_of(bad, 0, 2)
