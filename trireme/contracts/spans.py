"""Runs of response tokens, and what they stand for: one weight version each, or the tokens that carry loss.

Per-token lists are for code that computes; spans are for the wire, where most responses need only one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Protocol

from trireme.contracts.errors import ContractError
from trireme.contracts.v1.sample_pb2 import Span, VersionSpan


class _Run(Protocol):
    """What both span messages are."""

    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...


def version_spans(versions: Sequence[int]) -> list[VersionSpan]:
    """The spans of a response whose token i was sampled under `versions[i]`; none for an empty response."""
    return [VersionSpan(start=start, length=length, version=value) for start, length, value in _runs(versions)]


def token_versions(spans: Iterable[VersionSpan], length: int) -> list[int]:
    """The version of each of `length` tokens. Raises ContractError on a gap or an overlap."""
    spans = list(spans)
    check_cover(spans, length, "versions")
    return [span.version for span in spans for _ in range(span.length)]


def loss_spans(mask: Sequence[bool]) -> list[Span]:
    """The spans of the tokens where `mask` is true."""
    return [Span(start=start, length=length) for start, length, value in _runs(mask) if value]


def loss_mask(spans: Iterable[Span], length: int) -> list[bool]:
    """Of each of `length` tokens whether a span holds it. Raises ContractError on spans out of order or range."""
    spans = list(spans)
    check_order(spans, length, "loss_spans")
    mask = [False] * length
    for span in spans:
        mask[span.start : span.start + span.length] = [True] * span.length
    return mask


def check_order(spans: Sequence[_Run], length: int, field: str) -> None:
    """Raises ContractError naming `field` unless the spans are non-empty, ascending, disjoint and within `length`."""
    end = 0
    for index, span in enumerate(spans):
        if span.length == 0:
            raise ContractError(field, f"span {index} is empty")
        if span.start < end:
            raise ContractError(
                field, f"span {index} starts at token {span.start}, before token {end} where the one before ends"
            )
        end = span.start + span.length
    if end > length:
        raise ContractError(field, f"reach to token {end} of a response of {length}")


def check_cover(spans: Sequence[_Run], length: int, field: str) -> None:
    """As `check_order`, and every token must be in a span."""
    check_order(spans, length, field)
    end = 0
    for index, span in enumerate(spans):
        if span.start != end:
            raise ContractError(field, f"tokens {end} to {span.start} are in no span (before span {index})")
        end = span.start + span.length
    if end != length:
        raise ContractError(field, f"tokens {end} to {length} are in no span")


def _runs(values: Sequence[int]) -> Iterable[tuple[int, int, int]]:
    """(start, length, value) of every run of equal values."""
    start = 0
    for value, run in groupby(values):
        length = sum(1 for _ in run)
        yield start, length, value
        start += length
