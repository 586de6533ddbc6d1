"""Ctrl-C and SIGTERM as a question that the owner of the main loop asks, not as an exception anywhere."""

from __future__ import annotations

import contextlib
import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

TOGETHER_S = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts the requests to stop: the first asks to finish in order, the second to end at once.

    What comes within TOGETHER_S of the first is the same request: `timeout`, make and shells pass signals on.
    """

    def __init__(self) -> None:
        self.count = 0
        self._first_s = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            with contextlib.suppress(TypeError):  # a handler that was not set from Python cannot be put back
                signal.signal(number, handler)

    def requested(self) -> bool:
        return self.count >= 1

    def urgent(self) -> bool:
        return self.count >= 2

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.count == 0:
            self._first_s = now
        if self.count == 0 or now - self._first_s >= TOGETHER_S:
            self.count += 1
