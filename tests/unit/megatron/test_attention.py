"""Planned attention against softmax written out, one query at a time."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from services.trainer.backends.megatron.attention import (
    Angles,
    PlannedAttention,
    PlannedSeqParams,
    make_plan,
    rotate,
)
from services.trainer.backends.megatron.layout import Segment

HEADS, KV_HEADS, WIDTH = 6, 2, 8
LAYOUTS: dict[str, list[Segment]] = {
    "one": [Segment(0, 5)],
    "equal": [Segment(0, 4), Segment(4, 4), Segment(8, 4)],
    "ragged": [Segment(0, 1), Segment(1, 9), Segment(10, 2), Segment(12, 30)],
    "far apart": [Segment(0, 2), Segment(2, 600), Segment(602, 3)],
    "shared": [Segment(0, 5), Segment(5, 3, 0, 5), Segment(8, 1, 0, 5), Segment(9, 6, 0, 5)],
    "two groups and one alone": [
        Segment(0, 3),
        Segment(3, 4, 0, 3),
        Segment(7, 2, 0, 3),
        Segment(9, 7),
        Segment(16, 2, 9, 7),
        Segment(18, 5),
    ],
}


def expected(q: Tensor, k: Tensor, v: Tensor, segments: list[Segment], window: int | None) -> Tensor:
    rows = []
    for segment in segments:
        for place in range(segment.start, segment.start + segment.length):
            seen = [*range(segment.prefix_start, segment.prefix_start + segment.prefix_length)]
            seen += range(segment.start, place + 1)
            seen = seen[-(window or len(seen)) :]
            for head in range(HEADS):
                keys, values = k[seen, head // 3], v[seen, head // 3]
                weights = (keys @ q[place, head] / math.sqrt(WIDTH)).softmax(0)
                rows.append(weights @ values)
    return torch.stack(rows).view(len(q), HEADS * WIDTH)


def inputs(count: int) -> tuple[list[Tensor], Angles, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(count, heads, WIDTH, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    angles = torch.rand(count, 1, WIDTH // 2, generator=generator) * 6
    return tensors, Angles(angles.cos(), angles.sin()), torch.randn(count, HEADS * WIDTH, generator=generator)


@pytest.mark.parametrize("window", [None, 1, 4, 700])
@pytest.mark.parametrize("name", LAYOUTS)
def test_outputs_and_gradients(name: str, window: int | None) -> None:
    """window: how many tokens each query sees, those of its prefix among them."""
    segments = LAYOUTS[name]
    count = sum(segment.length for segment in segments)
    tensors, angles, grad = inputs(count)
    ours = [tensor.clone().requires_grad_() for tensor in tensors]
    params = PlannedSeqParams(plan=make_plan(segments, window=window), angles=angles, window_angles=angles)
    attention = PlannedAttention(SimpleNamespace(kv_channels=WIDTH), windowed=window is not None)
    out = attention(*ours, packed_seq_params=params)
    theirs = [tensor.double().requires_grad_() for tensor in tensors]
    wide = Angles(angles.cos.double(), angles.sin.double())
    reference = expected(rotate(theirs[0], wide), rotate(theirs[1], wide), theirs[2], segments, window)
    assert float((out - reference).abs().max()) <= 1e-5
    wanted = torch.autograd.grad(reference, theirs, grad.double())
    for a, b in zip(torch.autograd.grad(out, ours, grad), wanted, strict=True):
        assert float((a - b).abs().max()) <= 1e-4


def test_rotation_is_multiplication_by_a_complex_number() -> None:
    (query, _, _), angles, _ = inputs(4)
    first, second = rotate(query, angles).chunk(2, -1)
    turned = torch.complex(*query.chunk(2, -1)) * torch.complex(angles.cos, angles.sin)
    assert torch.allclose(torch.complex(first, second), turned, atol=1e-6)


def test_stacks_waste_little() -> None:
    lengths = torch.randint(1, 2000, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    starts = [sum(lengths[:index]) for index in range(60)]
    plan = make_plan([Segment(start, length) for start, length in zip(starts, lengths, strict=True)])
    padded = sum(block.queries.numel() * block.keys.shape[1] for block in plan.blocks)
    assert padded <= 1.5 * sum(length**2 for length in lengths) + 60 * 256**2
    assert len(plan.blocks) <= 15


def test_other_formats_are_refused() -> None:
    (query, key, value), _, _ = inputs(2)
    with pytest.raises(ValueError, match="packed sequences only"):
        PlannedAttention(SimpleNamespace(kv_channels=WIDTH))(query, key, value)
