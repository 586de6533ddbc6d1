"""Holding entries while working on them: leases are renewed, and given back when the work fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from trireme.streams.base import Entry, Stream
from trireme.streams.errors import StreamsError

log = logging.getLogger(__name__)

# Two renewals may be lost before a lease is.
RENEWALS_PER_LEASE = 3


@asynccontextmanager
async def held(stream: Stream, entries: Sequence[Entry]) -> AsyncIterator[set[str]]:
    """Renew the leases of `entries` while the body runs; when it raises or is cancelled, release them at once.

    Yields the ids of leases found lost so far, a set that grows: somebody else works on those.
    """
    lost: set[str] = set()
    ids = [entry.id for entry in entries]
    renewing = asyncio.create_task(_renew(stream, ids, lost))
    try:
        yield lost
    except BaseException:  # cancellation too must free the entries; everything is raised on
        with suppress(StreamsError):  # unreachable: then the lease ends by itself
            await stream.release(ids)
        raise
    finally:
        renewing.cancel()
        with suppress(asyncio.CancelledError):
            await renewing


async def _renew(stream: Stream, ids: Sequence[str], lost: set[str]) -> None:
    while True:
        await asyncio.sleep(stream.lease_s / RENEWALS_PER_LEASE)
        wanted = [entry_id for entry_id in ids if entry_id not in lost]
        try:
            lost |= set(wanted) - set(await stream.renew(wanted))
        except StreamsError as error:
            log.warning("could not renew leases", extra={"stream": stream.name, "error": str(error)})
