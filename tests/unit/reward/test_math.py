"""The math verifier against the cases that other graders got wrong. The right answers are mathematics, not ours."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from services.reward.verifiers.base import InfrastructureFailure, Outcome, Request, Score
from services.reward.verifiers.math import Math, MathPayload

VERIFIER = Math()
VERIFIER.load()


def judge(gold: str, response: str, how: str = "auto", prompt: str = "") -> Outcome:
    payload = MathPayload(answer=gold, format=how)  # type: ignore[arg-type]
    return VERIFIER.score(Request(payload, response, prompt_text=prompt))


def score(gold: str, response: str, how: str = "auto") -> float:
    outcome = judge(gold, response, how)
    assert isinstance(outcome, Score)
    return outcome.value


def box(answer: str) -> str:
    return rf"So it is $\boxed{{{answer}}}$."


CASES = [
    ("R-01", "840", r"\boxed{840}.... **Final Answer**" + "\n" + r"\boxed{840}", 1),
    ("R-01", "840840", r"\boxed{840}.... **Final Answer**" + "\n" + r"\boxed{840}", 0),
    ("R-01", "4", r"\boxed{004} \boxed{004}", 1),
    ("R-02", "3", r"\boxed{2} wait, actually \boxed{3}", 1),
    ("R-02", "2", r"\boxed{2} wait, actually \boxed{3}", 0),
    ("R-03", r"\frac{1}{3}", box(r"\frac{1}{2}"), 0),
    ("R-03", r"\frac{12}{3}", box(r"\frac{1}{23}"), 0),
    ("R-03", r"\frac{1}{2}", box(r"\frac{1}{2}"), 1),
    ("R-04", "42", r"\fbox{42}", 1),
    ("R-04", r"\frac{1}{2}", r"\fbox{\frac{1}{2}}", 1),
    ("R-04", "4", r"the answer is 4, \fbox{4", 0),
    ("R-09", "$13$", r"$\text{13}$", 1),
    ("R-09", "$13$", box(r"\text{13}"), 1),
    ("R-10", "73", "Step gives 234. Final Answer: **73**", 1),
    ("R-11", r"\frac{1}{2^{99}}", box(r"\frac{1}{2^{98}}"), 0),
    ("R-11", r"\frac{1}{2^{99}}", box(r"2^{-99}"), 1),
    ("R-11", "0.0000001", box("0.0000002"), 0),
    ("R-11", r"\frac{1}{10^8}", box(r"\frac{1}{10^{10}}"), 0),
    ("R-11", r"\sqrt{2} \cdot 10^{-9}", box(r"\sqrt{3} \cdot 10^{-9}"), 0),
    ("R-13", r"$4\sqrt(2)$", "$4$", 0),
    ("R-13", r"$4\sqrt(2)$", box(r"4\sqrt{2}"), 1),
    ("R-13", r"4\sqrt{2}", box(r"4\sqrt(2)"), 1),
    ("R-13", r"\frac(1)(2)", box("0.5"), 1),
    ("R-13", "4", box(r"4\sqrt["), 0),
    ("R-13", "4", box(r"4 \frac{"), 0),
    ("R-16", "$n=1,2,3$", "$n=2,3,4$", 0),
    ("R-16", "$(0,1)$", "$(0,1.5)$", 0),
    ("R-16", "$[0,1)$", "$(0,1)$", 0),
    ("R-16", r"\pm2021", box("2021"), 0),
    ("R-16", r"\pm2021", box(r"\{-2021,2021\}"), 1),
    ("R-16", "1:00", box("12:00"), 0),
    ("R-16", "12:00", box("12:00"), 1),
    ("R-16", "$1+1/e$", "$1-1/e$", 0),
    ("R-17", "40/9", box("4 4/9"), 1),
    ("R-17", "4", box("4 4/9"), 0),
    ("R-17", "4 4/9", box("40/9"), 1),
    ("R-17", "4 4/9", box("4"), 0),
    ("R-17", "40/9", "Final answer: 4 4/9", 1),
    ("R-17", r"4\frac{4}{9}", box("40/9"), 1),
    ("R-18", r"28\%", box("0.28"), 1),
    ("R-18", r"28\%", box("28"), 1),
    ("R-18", "0.28", box(r"28\%"), 1),
    ("R-18", r"28\%", box("2.8"), 0),
    ("R-18", "28", box("0.28"), 0),
    ("R-19", "1000", box("1,000"), 1),
    ("R-19", "1000", box("1{,}000"), 1),
    ("R-19", "1000", box("1 000"), 1),
    ("R-19", "1000", box(r"1\,000"), 1),
    ("R-19", "11000", box(r"11,\! 000"), 1),
    ("R-19", "1000.99", box("1000,99"), 1),
    ("R-19", "3000000", box("3,000,000"), 1),
    ("R-19", "(1000,2)", box("(1,000, 2)"), 1),
    ("R-19", "(1,0,2)", box("(1,000, 2)"), 0),
    ("R-19", "(100,200)", box("(100, 200)"), 1),
    ("R-19", "70000", r"It costs \$70,000", 1),
    ("R-19", "70000", box(r"\$70,000"), 1),
    ("R-22", "42", r"\boxed{42}", 1),
    ("R-22", "42", "I don't know.", 0),
    ("R-22", "42", r"\boxed{137}", 0),
    ("-", "1/3", box("0.333333"), 1),
    ("-", "1/3", box("0.33"), 0),
    ("-", "x+1", box("1+x"), 1),
    ("-", "x+1", box("x-1"), 0),
    ("-", r"2\sqrt{3}", box(r"\sqrt{12}"), 1),
    ("-", r"\text{Evelyn}", box("Evelyn"), 1),
    ("-", r"10\text{ cm}", box("10"), 1),
    ("-", r"(-\infty, 3]", box(r"(-\infty,3]"), 1),
    ("-", r"\begin{pmatrix}1\\2\end{pmatrix}", box(r"\begin{pmatrix}1\\2\end{pmatrix}"), 1),
    ("-", r"\begin{pmatrix}1\\2\end{pmatrix}", box(r"\begin{pmatrix}2\\1\end{pmatrix}"), 0),
    ("-", "Natalia sold 72 clips. #### 72", box("72"), 1),
    ("-", r"We add and get \boxed{72}.", "#### 72", 1),
]


@pytest.mark.parametrize(("row", "gold", "response", "right"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_catalogue(row: str, gold: str, response: str, right: int) -> None:
    """R-01, R-02, R-03, R-04, R-09, R-10, R-11, R-13, R-16, R-17, R-18, R-19, R-22.

    R-18, decided: a percentage equals both the fraction and the bare number; without a % sign nothing is scaled.
    """
    assert score(gold, response) == right


def test_a_known_limit() -> None:
    r"""R-15: \sqrt{1/n} equals 1/\sqrt{n} only for n > 0, which nothing says; the answer is refused."""
    assert score(r"1/\sqrt{n}", box(r"\sqrt{1/n}")) == 0


@pytest.mark.parametrize("gold", ["", "  ", "it depends on the case", "None of the above", r"4\sqrt[", "$"])
@pytest.mark.parametrize("response", ["", "x", r"\boxed{}", r"\boxed{it depends on the case}", r"\boxed{4\sqrt[}"])
def test_a_broken_reference_is_never_a_reward(gold: str, response: str) -> None:
    """R-08: neither 1 nor 0, even when the response repeats it; the sample is left out."""
    assert isinstance(judge(gold, response), InfrastructureFailure)


@pytest.mark.parametrize(
    ("how", "response", "extracted", "value"),
    [
        ("gsm8k", r"\boxed{42}", False, 0),
        ("gsm8k", "#### 42.", True, 1),
        ("boxed", "#### 42", False, 0),
        ("boxed", r"\boxed{42}", True, 1),
        ("answer_tags", "<answer>42</answer>", True, 1),
        ("answer_tags", r"<answer>\boxed{42}</answer>", True, 1),
        ("answer_tags", "42", False, 0),
        ("auto", "#### 42", True, 1),
        ("auto", "I cannot say.", False, 0),
        ("auto", "", False, 0),
    ],
)
def test_formats(how: str, response: str, extracted: bool, value: float) -> None:
    """R-07: where the answer stands is configurable, and an answer in another place is reported as not extracted."""
    outcome = judge("42", response, how)
    assert isinstance(outcome, Score)
    assert (outcome.extracted, outcome.value) == (extracted, value)


def test_only_the_response_counts() -> None:
    r"""R-26: an example \boxed{} in the prompt is no answer."""
    outcome = judge("42", "", prompt=r"Answer like \boxed{42}.")
    assert outcome == Score(0.0, extracted=False)


@pytest.mark.parametrize(
    "attack",
    [
        "__import__('os').system('touch pwned')",
        "9**9**9**9",
        "9^{9^{9^{9}}}",
        "9^{9^{9}}",
        "10^{10^{10}}",
        "99999999!",
        "((9!)!)!",
        r"\frac{" * 300,
        "(" * 900,
        "1" * 100_000,
        "2^" * 400 + "2",
    ],
)
def test_hostile_answers(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-27: nothing is executed, and time stays bounded before the pool has to kill."""
    monkeypatch.chdir(tmp_path)
    started = time.process_time()
    assert score("42", attack) == 0
    assert score("42", box(attack)) == 0
    assert time.process_time() - started < 20
    assert not (tmp_path / "pwned").exists()


def test_scores_in_any_thread() -> None:
    """R-21: no signals, which only a main thread may use."""
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(score("1/2", box("0.5"))))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_numbers_as_reference_answers() -> None:
    assert MathPayload.model_validate({"answer": 42}).answer == "42"


def test_importing_the_verifier_is_cheap() -> None:
    """The service lists verifiers without loading sympy; only scoring processes do."""
    code = "import sys, services.reward.verifiers.math; assert 'sympy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3], timeout=60)
