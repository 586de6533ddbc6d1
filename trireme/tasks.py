"""Ending an asyncio task for certain."""

from __future__ import annotations

import asyncio
from typing import Any

ASK_AGAIN_S = 3.0


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and return when it has ended; what it raised or returned is its own affair.

    A cancellation that arrives just as a timeout inside the task fires, or just as what it waits for completes, can
    be swallowed on the way (Python before 3.12 does so in `wait_for`). So it is repeated, though not before an orderly
    end had its time.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=ASK_AGAIN_S)
    if not task.cancelled():
        task.exception()  # seen, so that the loop does not report it as never retrieved
