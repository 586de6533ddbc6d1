"""The trainer's side of FetchWeights: an offered version as a stream of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from trireme.contracts.v1.weights_pb2 import WeightChunk
from trireme.weights.base import Transport


class WeightsUnavailable(LookupError):
    """The version asked for is not, or no longer, on offer: answer NOT_FOUND."""


async def stream_chunks(transport: Transport, version: int, chunk_bytes: int) -> AsyncIterator[WeightChunk]:
    """Every byte of `version` in chunks of at most `chunk_bytes`, tensor by tensor.

    Raises WeightsUnavailable before the first chunk when the version is not on offer, or midway when it is
    withdrawn meanwhile.
    """
    segment = transport.published(version)
    if segment is None:
        raise WeightsUnavailable(f"weights version {version} is not on offer")
    for index, info in enumerate(segment.manifest.tensors):
        for offset in range(0, info.nbytes, chunk_bytes):
            try:
                data = await asyncio.to_thread(segment.read, index, offset, chunk_bytes)
            except OSError as error:  # the file was closed: a newer version replaced it
                raise WeightsUnavailable(f"weights version {version} was withdrawn while being read") from error
            yield WeightChunk(tensor=index, offset=offset, data=data)
