"""What the pool and its processes say to each other: frames of a 4-byte length and that many bytes.

The pool sends a serialized ScoreRequest; the process answers with `BEGIN` when the verifier is loaded and about to
score, then with one JSON object, the report. No pickle: a verifier judges text that a model wrote.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

HEADER = struct.Struct(">I")
BEGIN = b"begin"

Kind = Literal["score", "policy_failure", "infrastructure_failure", "error"]


@dataclass(frozen=True)
class Report:
    """What one attempt gave. `error` is an attempt that may be tried again; the other kinds are final."""

    kind: Kind
    value: float = 0.0
    components: dict[str, float] = field(default_factory=dict)
    extracted: bool = True
    reason: str = ""
    cause: str = ""  # of an error: timeout, crash, exception, invalid


def encode(report: Report) -> bytes:
    return json.dumps(asdict(report), allow_nan=False).encode()


def decode(data: bytes) -> Report:
    """Raises ValueError when `data` is not a report."""
    fields: dict[str, Any] = json.loads(data)
    try:
        return Report(**fields)
    except TypeError as error:
        raise ValueError(f"not a report: {error}") from error


def frame(data: bytes) -> bytes:
    return HEADER.pack(len(data)) + data
