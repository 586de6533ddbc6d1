"""The Stream port: a queue that one kind of service fills and another drains, with nothing lost when either dies.

`redis.py` implements it. Another broker is one more file with the methods below.

An entry is in one of three states: waiting, leased to one consumer, or gone. Only `done`, `forward` and `dead_letter`
make it gone. A lease ends by itself, so whoever takes an entry must tolerate that another consumer works on it too:
delivery is at least once, and the last consumer drops duplicates by the id inside the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Entry:
    """One delivery of one entry. `deliveries` counts from 1 and includes this one."""

    id: str
    data: bytes
    deliveries: int


@dataclass(frozen=True)
class DeadLetter:
    """An entry that was given up: from the stream `source`, for `reason`, after `deliveries` deliveries."""

    id: str
    data: bytes
    reason: str
    source: str
    deliveries: int


class Stream(Protocol):
    """See the module. `name` is for logs and metrics; `lease_s` is how long a lease lasts unless renewed."""

    @property
    def name(self) -> str: ...
    @property
    def lease_s(self) -> float: ...

    async def put(self, data: bytes) -> str:
        """Append; the entry's id. A connection lost on the way, or an error, may leave the entry appended twice."""
        ...

    async def take(self, count: int, block_s: float) -> list[Entry]:
        """Up to `count` entries, leased to this consumer; empty when there are none for `block_s` seconds.

        Entries whose lease ran out come first. Those delivered too often go to the dead letters instead.
        A cancelled take may leave entries leased; they come back when the lease ends.
        """
        ...

    async def renew(self, entry_ids: Sequence[str]) -> list[str]:
        """Start these leases anew. The ids still held: others have, or had, the rest, and work on them is wasted."""
        ...

    async def release(self, entry_ids: Sequence[str]) -> None:
        """Give leases back early: anyone may take these entries at once. Those no longer held are left alone."""
        ...

    async def done(self, entry_ids: Sequence[str]) -> None:
        """Make entries gone. Call it only when what came of them is safe elsewhere; repeating it is harmless."""
        ...

    async def forward(self, entry: Entry, to: Stream, outputs: Sequence[bytes]) -> bool:
        """At once: append `outputs` to `to` and make `entry` gone; both happen or neither.

        False when the entry was gone already, then nothing was appended: of several consumers that worked on the
        same entry, the first forwards. Repeating it after an error is safe.
        """
        ...

    async def dead_letter(self, entry: Entry, reason: str) -> None:
        """At once: record entry and reason among the dead letters and make it gone. Harmless when it is gone."""
        ...

    async def clear(self) -> int:
        """Make every entry gone, leased ones too, as when a run starts over; how many. Forwarding one is then False."""
        ...

    async def depth(self) -> int:
        """Entries waiting or leased."""
        ...

    async def oldest_age_s(self) -> float | None:
        """Seconds since the oldest entry in the stream was put, by the server's clock; None when it is empty."""
        ...

    async def pending(self) -> int:
        """Entries leased, including those whose lease ran out."""
        ...
