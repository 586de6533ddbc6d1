"""The end of a service's log, as a person wants to read it when the service has failed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

TAIL_BYTES = 65536
# What every structured line has, or what is shown in another way.
KNOWN = ("time", "level", "service", "logger", "message", "exception")


def last_lines(path: Path, count: int, start: int = 0) -> list[str]:
    """Up to `count` last lines of a file, nothing before byte `start`; structured lines are unfolded."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        raw = file.read().decode(errors="replace").splitlines()
    return list(readable(raw))[-count:]


def readable(lines: Iterable[str]) -> Iterator[str]:
    """Structured log lines as `LEVEL message (key=value)` with their traceback below; other lines as they are."""
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if isinstance(found, dict) and "message" in found:
            extras = ", ".join(f"{key}={value}" for key, value in found.items() if key not in KNOWN)
            yield f"{found.get('level', '')} {found['message']}{f' ({extras})' if extras else ''}".strip()
            yield from str(found.get("exception", "")).splitlines()
        else:
            yield line
