"""What every block shares: strictness, and defaults that refer to another key."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Block(BaseModel):
    """A block of keys. Types are exact (no "8" for 8), unknown keys are refused, values do not change once loaded."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, validate_default=True)


def ref(key: str) -> Any:
    """A default equal to the value of another key, by its dotted path; it follows overrides of that key."""
    return f"${{{key}}}"
