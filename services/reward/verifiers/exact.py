"""Answers that must match as text or as a number."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import ClassVar

from pydantic import Field, field_validator

from services.reward.verifiers.base import Outcome, Payload, Request, Score
from services.reward.verifiers.text import Extraction, extract

_NUMBER = re.compile(r"[$€£]?\s*([+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?)\.?")
_LONGEST_NUMBER = 100  # characters; longer "numbers" are compared as text


class ExactPayload(Payload):
    answer: str = Field(description="the right answer; numbers may be given as numbers", min_length=1)
    extraction: Extraction = Field(
        default="raw", description="where the answer is: raw (all), last_line, last_number, answer_tags"
    )
    ignore_case: bool = Field(default=True, description="compare text without regard to case")
    tolerance: float = Field(default=0.0, ge=0, description="absolute difference allowed between numbers")

    @field_validator("answer", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def number(text: str) -> Decimal | None:
    """`text` read as a plain number (sign, thousands commas, currency, full stop allowed), or None."""
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= _LONGEST_NUMBER else None
    try:
        return Decimal(match[1].replace(",", "")) if match else None
    except InvalidOperation:
        return None


def same(answer: str, gold: str, *, ignore_case: bool = True, tolerance: float = 0.0) -> bool:
    """Equal as numbers if both are numbers, else equal as text with blanks folded."""
    a, b = number(answer), number(gold)
    if a is not None and b is not None:
        return abs(a - b) <= Decimal(repr(tolerance))
    a_text, b_text = " ".join(answer.split()), " ".join(gold.split())
    return a_text.casefold() == b_text.casefold() if ignore_case else a_text == b_text


class Exact:
    name: ClassVar[str] = "exact"
    version: ClassVar[str] = "1"
    schema: ClassVar[type[ExactPayload]] = ExactPayload
    stateless: ClassVar[bool] = True

    def score(self, request: Request) -> Outcome:
        task = request.payload
        assert isinstance(task, ExactPayload)
        answer = extract(request.response_text, task.extraction)
        if answer is None:
            return Score(0.0, extracted=False)
        return Score(float(same(answer, task.answer, ignore_case=task.ignore_case, tolerance=task.tolerance)))
