"""Back-pressure: a full stream makes its producer wait. Nothing is ever dropped to make room."""

from __future__ import annotations

import asyncio
import time

from trireme.streams.base import Stream
from trireme.streams.errors import StreamsError

POLL_S = 0.1


class StreamFull(StreamsError):
    """Nothing drained the stream for as long as the producer would wait. The entry was not appended."""


async def put_when_room(stream: Stream, data: bytes, capacity: int, timeout_s: float, poll_s: float = POLL_S) -> str:
    """Append once fewer than `capacity` entries are waiting or leased; the entry's id.

    Raises StreamFull when there is no room within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while (entry_id := await stream.put_below(data, capacity)) is None:
        if time.monotonic() >= deadline:
            raise StreamFull(
                f"stream {stream.name} held {capacity} entries for {timeout_s:g} s: is its consumer alive?"
            )
        await asyncio.sleep(poll_s)
    return entry_id
