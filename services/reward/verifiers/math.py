"""Mathematical answers, compared by math-verify after an extraction and checks of our own.

What math-verify would get wrong is decided here: it reads several boxes as a set, reads as much of a malformed formula
as it can and drops the rest, and rounds small numbers until they are equal. It also guards itself with signals, which
threads refuse; the pool's kill takes their place.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from services.reward.verifiers import formula
from services.reward.verifiers.base import InfrastructureFailure, Outcome, Payload, Request, Score
from services.reward.verifiers.text import after_hashes, has_box, last_boxed, last_tag

Format = Literal["auto", "boxed", "gsm8k", "answer_tags"]


class MathPayload(Payload):
    answer: str = Field(description="the right answer: LaTeX, a number, or a solution that ends in a box or ####")
    format: Format = Field(
        default="auto",
        description=r"where the answer stands: boxed (last \boxed{}), gsm8k (after ####), answer_tags, or auto: "
        "the last box, else after ####, else what math-verify finds in the text",
    )

    @field_validator("answer", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def extract_answer(text: str, how: Format) -> str | None:
    """The answer that a response gives, as it is written; None when it gives none."""
    if how == "gsm8k":
        return after_hashes(text)
    if how == "answer_tags":
        inner = last_tag(text, "answer")
        return (last_boxed(inner) or inner) if inner else None
    if how == "boxed" or has_box(text):  # a box that never closes is no answer, whatever else the text says
        return last_boxed(text) or None
    return after_hashes(text) or formula.find(text)


def gold_answer(answer: str) -> str:
    """The reference answer without the solution around it."""
    return last_boxed(answer) or after_hashes(answer) or answer.strip()


@functools.lru_cache(maxsize=4096)  # a group's samples share their reference answer
def parse_gold(answer: str) -> tuple[Any, ...]:
    """Expressions of the reference answer; empty when it is none."""
    return () if formula.is_prose(answer) else tuple(formula.parse(answer))


class Math:
    name: ClassVar[str] = "math"
    version: ClassVar[str] = "1"
    schema: ClassVar[type[MathPayload]] = MathPayload
    stateless: ClassVar[bool] = True

    def load(self) -> None:
        formula.load()

    def score(self, request: Request) -> Outcome:
        task = request.payload
        assert isinstance(task, MathPayload)
        gold_text = gold_answer(task.answer)
        gold = parse_gold(gold_text)
        if not gold:
            return InfrastructureFailure(f"the reference answer {task.answer[:200]!r} is not a mathematical expression")
        answer = extract_answer(request.response_text, task.format)
        if answer is None:
            return Score(0.0, extracted=False)
        return Score(float(formula.equal(gold, gold_text, answer)))
