"""Tensors of awkward shapes and every kind of dtype, and a real FetchWeights server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from trireme.contracts.v1 import trainer_pb2, trainer_pb2_grpc
from trireme.weights.serving import WeightsUnavailable, stream_chunks


@pytest.fixture
def tensors() -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        ("model.embed_tokens.weight", torch.randn(301, 7, generator=generator)),
        ("model.layers.0.q.weight", torch.randn(5, 3, generator=generator).bfloat16()),
        ("model.layers.0.transposed", torch.randn(4, 6, generator=generator).t()),
        ("scalar", torch.tensor(3.5, dtype=torch.float16)),
        ("empty", torch.empty(0, 4)),
        ("counts", torch.arange(11)),
        ("flags", torch.tensor([True, False, True])),
    ]


class FetchServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """What a trainer does: answers FetchWeights from its transport."""

    def __init__(self, transport: Any, chunk_bytes: int) -> None:
        self.transport, self.chunk_bytes, self.sent = transport, chunk_bytes, 0

    async def FetchWeights(self, request: trainer_pb2.FetchWeightsRequest, context: Any) -> AsyncIterator[Any]:
        try:
            async for chunk in stream_chunks(self.transport, request.version, self.chunk_bytes):
                self.sent += 1
                yield chunk
        except WeightsUnavailable as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
