"""Identifiers: a sample's is the same for every attempt at it, so that a duplicate is seen as one."""

from __future__ import annotations

import secrets


def sample_id(group_id: str, index: int) -> str:
    """The id of sample `index` of a group."""
    return f"{group_id}/{index}"


def split_sample_id(identifier: str) -> tuple[str, int]:
    """Inverse of `sample_id`. Raises ValueError on anything else."""
    group_id, slash, index = identifier.rpartition("/")
    if not slash or not group_id or not index.isdecimal():
        raise ValueError(f"{identifier!r} is not a sample id: expected <group id>/<index>")
    return group_id, int(index)


def new_trace_id() -> str:
    """A random trace id as W3C Trace Context writes it: 32 hex digits."""
    return secrets.token_hex(16)
