"""Finding answers in responses."""

from __future__ import annotations

import time

import pytest

from services.reward.verifiers.text import (
    END_TOKENS,
    after_hashes,
    extract,
    last_boxed,
    last_number,
    last_tag,
    strip_end_tokens,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{840}.... **Final Answer**\n\boxed{840}", "840"),
        (r"\boxed{2} wait, actually \boxed{3}", "3"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{42}", "42"),
        (r"\fbox{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{4", None),
        (r"\boxed{3} and then \boxed{4", "3"),
        (r"\boxed{4 and then \boxed{3}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"} \boxed{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{}", ""),
        ("no box", None),
        ("", None),
    ],
)
def test_the_last_balanced_box(text: str, answer: str | None) -> None:
    """R-01, R-02, R-03, R-04: the last box whose braces balance, with all that is nested in it."""
    assert last_boxed(text) == answer


def test_boxes_that_never_close_cost_linear_time() -> None:
    """R-27: a response of nothing but opened boxes."""
    started = time.process_time()
    assert last_boxed(r"\boxed{" * 100_000) is None
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so #### 42.", "42"),
        ("#### $42", "42"),
        ("#### 1,234", "1234"),
        ("#### 1 #### 2\nmore", "2"),
        ("#### -5", "-5"),
        ("####", None),
        (r"\boxed{42}", None),
    ],
)
def test_gsm8k_answers(text: str, answer: str | None) -> None:
    """R-06: punctuation, currency and thousands after the hashes."""
    assert after_hashes(text) == answer


@pytest.mark.parametrize(
    ("text", "how", "answer"),
    [
        ("  7 \n", "raw", "7"),
        ("think\n 7 \n\n", "last_line", "7"),
        ("<answer>1</answer> no, <answer> 7 </answer>.", "answer_tags", "7"),
        ("<answer>7", "answer_tags", None),
        ("7</answer> <answer>", "answer_tags", None),
        ("7 - 3 = 4", "last_number", "4"),
        ("it is -3", "last_number", "-3"),
        ("1,234.50 dollars", "last_number", "1234.50"),
        ("none", "last_number", None),
        ("", "raw", None),
        (" \n ", "last_line", None),
    ],
)
def test_extraction(text: str, how: str, answer: str | None) -> None:
    """T-15: an empty response has no answer, and is no error."""
    assert extract(text, how) == answer  # type: ignore[arg-type]


def test_tags_in_another_order_are_no_pair() -> None:
    assert last_tag("</think><think>", "think") is None


def test_a_minus_after_an_operand_is_no_sign() -> None:
    assert last_number("5-3") == "3"


@pytest.mark.parametrize("token", END_TOKENS)
def test_end_tokens_do_not_change_the_answer(token: str) -> None:
    """R-29: the text of a stop token that the detokenizer left in the response."""
    for text in ("42", r"so \boxed{42}", "<answer>42</answer>"):
        assert strip_end_tokens(text + token) == text
        assert strip_end_tokens(text + token + token + "\n") == text
    assert strip_end_tokens(f"4{token}2") == "4 2"
