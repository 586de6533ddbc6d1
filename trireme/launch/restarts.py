"""When a service that died is started again: pure bookkeeping, the clock is passed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """Delays of first_s, first_s * factor, ... up to longest_s; after `limit` deaths in a row it is given up.

    A service that stayed up for settled_s after its last start has a clean slate: a death a day is not a crash loop.
    """

    limit: int = 5
    first_s: float = 1.0
    factor: float = 2.0
    longest_s: float = 30.0
    settled_s: float = 300.0


class Restarts:
    """The deaths of one service."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.in_a_row = 0
        self.total = 0

    def next_delay_s(self, lived_s: float) -> float | None:
        """Seconds to wait before the next start of a service that just died after `lived_s`; None: give it up."""
        if lived_s >= self._policy.settled_s:
            self.in_a_row = 0
        if self.in_a_row >= self._policy.limit:
            return None
        delay = min(self._policy.longest_s, self._policy.first_s * self._policy.factor**self.in_a_row)
        self.in_a_row += 1
        self.total += 1
        return delay
