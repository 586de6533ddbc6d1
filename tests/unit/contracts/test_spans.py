"""Spans mean what a per-token list means, in both directions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.contracts.errors import ContractError
from trireme.contracts.spans import loss_mask, loss_spans, token_versions, version_spans
from trireme.contracts.v1.sample_pb2 import Span, VersionSpan

VERSIONS = st.lists(st.integers(0, 3), max_size=60)
MASKS = st.lists(st.booleans(), max_size=60)


@given(VERSIONS)
def test_versions_survive(versions: list[int]) -> None:
    assert token_versions(version_spans(versions), len(versions)) == versions


@given(VERSIONS)
def test_version_spans_are_the_fewest(versions: list[int]) -> None:
    changes = sum(1 for before, after in pairwise(versions) if before != after)
    assert len(version_spans(versions)) == changes + bool(versions)


@given(MASKS)
def test_masks_survive(mask: list[bool]) -> None:
    """T-09: tokens the model did not write stay out, wherever they stand."""
    assert loss_mask(loss_spans(mask), len(mask)) == mask


@given(MASKS)
def test_loss_spans_count_the_trained_tokens(mask: list[bool]) -> None:
    spans = loss_spans(mask)
    assert sum(span.length for span in spans) == sum(mask)
    assert all(first.start + first.length < then.start for first, then in pairwise(spans))


def test_tool_tokens_by_example() -> None:
    """T-09: assistant, assistant, tool, tool, assistant."""
    assert loss_spans([True, True, False, False, True]) == [Span(start=0, length=2), Span(start=4, length=1)]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=5), st.integers(0, 20))
def test_versions_are_accepted_exactly_when_each_token_has_one(runs: list[tuple[int, int]], length: int) -> None:
    """Against counting: in order, each token in one span, none empty, none outside."""
    positions = [start + offset for start, size in runs for offset in range(size)]
    fine = positions == list(range(length)) and all(size for _, size in runs)
    spans = [VersionSpan(start=start, length=size, version=1) for start, size in runs]
    if fine:
        assert token_versions(spans, length) == [1] * length
    else:
        with pytest.raises(ContractError, match=r"^versions: "):
            token_versions(spans, length)


@pytest.mark.parametrize(
    ("spans", "length", "problem"),
    [
        ([(0, 2), (3, 1)], 4, "tokens 2 to 3 are in no span"),
        ([(0, 2)], 3, "tokens 2 to 3 are in no span"),
        ([(0, 2), (1, 2)], 3, "span 1 starts at token 1, before token 2 where the one before ends"),
        ([(0, 4)], 3, "reach to token 4 of a response of 3"),
        ([(0, 0)], 0, "span 0 is empty"),
    ],
)
def test_the_message_says_where(spans: list[tuple[int, int]], length: int, problem: str) -> None:
    with pytest.raises(ContractError, match=problem):
        token_versions([VersionSpan(start=start, length=size) for start, size in spans], length)
