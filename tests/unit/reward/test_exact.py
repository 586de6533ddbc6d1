"""Exact answers, as text and as numbers."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.reward.verifiers.base import Request, Score
from services.reward.verifiers.exact import Exact, ExactPayload


def judge(response: str, **payload: object) -> Score:
    outcome = Exact().score(Request(ExactPayload.model_validate(payload), response))
    assert isinstance(outcome, Score)
    return outcome


@pytest.mark.parametrize(
    ("gold", "response", "right"),
    [
        ("42", "42", 1),
        ("42", " 42.\n", 1),
        ("42", "42.0", 1),
        ("42", "$42", 1),
        ("42", "+42", 1),
        ("1234", "1,234", 1),
        ("1234", "12,34", 0),
        ("42", "420", 0),
        ("-42", "42", 0),
        ("42", "42%", 0),
        ("0.1", "0.10", 1),
        ("100000000000000000001", "100000000000000000000", 0),
        ("Paris", "paris", 1),
        ("New York", "new\n york", 1),
        ("Paris", "Paris, France", 0),
        (42, "42", 1),
        (0.5, ".5", 1),
    ],
)
def test_equal_as_number_or_text(gold: object, response: str, right: int) -> None:
    assert judge(response, answer=gold) == Score(float(right))


def test_case_and_tolerance_are_configurable() -> None:
    assert judge("paris", answer="Paris", ignore_case=False).value == 0
    assert judge("0.334", answer="0.333", tolerance=0.001).value == 1
    assert judge("0.335", answer="0.333", tolerance=0.001).value == 0


def test_no_answer_is_told_apart_from_a_wrong_one() -> None:
    """R-07, R-26, T-15: nothing extracted is reported; an empty response is a 0, whatever the prompt said."""
    assert judge("", answer="42") == Score(0.0, extracted=False)
    assert judge("42", answer="42", extraction="answer_tags") == Score(0.0, extracted=False)


@pytest.mark.parametrize("payload", [{}, {"answer": ""}, {"answer": "1", "anser": "2"}, {"answer": True}])
def test_a_bad_payload_is_refused(payload: dict[str, object]) -> None:
    """R-08: an empty reference matches nothing."""
    with pytest.raises(ValidationError):
        ExactPayload.model_validate(payload)
