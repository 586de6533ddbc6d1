"""Procedural tasks are judged by the library's own scorers, on entries that travelled as JSON."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from services.reward.verifiers import evaluated
from services.reward.verifiers.base import InfrastructureFailure, Outcome, PolicyFailure, Request, Score
from services.reward.verifiers.reasoning_gym import ReasoningGym, ReasoningGymPayload, restored
from services.trainer.data.families import plain

# These take seconds for one entry, or cannot be made without parameters.
SLOW = {"knight_swap", "composite"}
# Their answer is not text, so that there is none to repeat.
NO_REFERENCE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def judge(family: str, entry: dict[str, object], response: str, **options: object) -> Outcome:
    wire = json.dumps({"dataset": family, "entry": plain(entry), **options})
    return ReasoningGym().score(Request(ReasoningGymPayload.model_validate_json(wire), response))


@pytest.mark.parametrize("family", sorted(set(DATASETS) - SLOW - NO_REFERENCE))
def test_the_reference_answer_scores_as_in_the_library(family: str) -> None:
    """Every family: an entry that went through JSON is scored as the one that did not."""
    dataset = reasoning_gym.create_dataset(family, seed=3, size=4)
    entry = dataset[1]
    answer = entry["answer"].strip()
    assert judge(family, entry, answer) == Score(dataset.score_answer(answer, entry))
    assert dataset.score_answer(answer, entry) > 0.9
    wrong = judge(family, entry, "utterly wrong")
    assert isinstance(wrong, PolicyFailure) or wrong == Score(dataset.score_answer("utterly wrong", entry))


def test_a_graph_colouring_is_checked_not_compared() -> None:
    dataset = reasoning_gym.create_dataset("graph_color", seed=3, size=4)
    entry = dataset[0]
    colours = {str(k): v for k, v in entry["metadata"]["possible_answer"].items()}
    assert judge("graph_color", entry, json.dumps(colours)) == Score(1.0)
    same = dict.fromkeys(colours, 1)
    assert judge("graph_color", entry, json.dumps(same)) == Score(0.01)


def test_what_json_cannot_write_comes_back() -> None:
    value = {"board": ((1, 2), [(3,)]), "colours": {1: "red", 2: ("a",)}, "none": None, "empty": {}}
    assert restored(json.loads(json.dumps(plain(value)))) == value


def test_extraction_and_parameters() -> None:
    """R-07: the place of the answer is the task's; a missing one is reported."""
    entry = {"question": "1 + 1 =", "answer": "2"}
    assert judge("chain_sum", entry, "2", extraction="answer_tags") == Score(0.0, extracted=False)
    assert judge("chain_sum", entry, "so <answer>2</answer>", extraction="answer_tags") == Score(1.0)
    assert judge("chain_sum", entry, "thinking\n2", extraction="last_line") == Score(1.0)
    assert judge("chain_sum", entry, "1 + 1 = 2", extraction="last_number") == Score(1.0)
    assert judge("chain_sum", entry, "") == Score(0.0, extracted=False)
    assert judge("chain_sum", entry, "2", params={"max_terms": 3}) == Score(1.0)


@pytest.mark.parametrize(
    "payload", [{"dataset": "chain_summ"}, {"dataset": "chain_sum", "params": {"terms": 2}}, {"dataset": "composite"}]
)
def test_a_task_that_nobody_can_score_is_our_failure(payload: dict[str, object]) -> None:
    """R-28: never 0."""
    entry = {"question": "", "answer": "2"}
    outcome = judge(str(payload["dataset"]), entry, "2", params=payload.get("params", {}))
    assert isinstance(outcome, InfrastructureFailure)


def test_a_scorer_that_trips_over_an_answer_tells_whose_fault_it_is() -> None:
    """R-28: prime_factorization raises on words. With a sound reference that is the model's failure, else ours."""
    sound = reasoning_gym.create_dataset("prime_factorization", seed=3, size=4)[1]
    assert isinstance(judge("prime_factorization", sound, "no idea"), PolicyFailure)
    with pytest.raises(ValueError, match="invalid literal"):
        judge("prime_factorization", {**sound, "answer": "no idea"}, "no idea")


def evaluating_families() -> set[str]:
    """Families whose module evaluates text in a function that scores, by reading the library's source."""
    found = set()
    for name, (dataset, _) in DATASETS.items():
        tree = ast.parse(Path(inspect.getfile(dataset)).read_text())
        for node in ast.walk(tree):
            scores = isinstance(node, ast.FunctionDef) and re.search("score|verify", node.name)
            source = ast.unparse(node) if scores else ""
            if re.search(r"\b(eval|exec|parse_expr|sympify)\(", source):
                found.add(name)
    return found - {"propositional_logic"}  # its parse_expr is its own and evaluates nothing


def test_every_family_that_evaluates_text_is_guarded() -> None:
    """R-27: also those of a later version of the library."""
    assert evaluating_families() <= set(evaluated.ANSWERS) | set(evaluated.ENTRIES)


ATTACKS = [
    "__import__('os').system('touch pwned')",
    "[__import__('os').system('touch pwned')]",
    "().__class__.__base__.__subclasses__()",
    "x.__class__",
    "open('pwned', 'w')",
    "(lambda: open('pwned', 'w'))()",
    "entry['answer']",
    "entry",
    "answer",
    "S('open(1)')",
]


@pytest.mark.parametrize("family", sorted(evaluated.ANSWERS))
@pytest.mark.parametrize("attack", ATTACKS)
def test_answers_are_not_run(family: str, attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-27: no code from a model, nor the reference answer read out of the scorer's own variables."""
    monkeypatch.chdir(tmp_path)
    entry = reasoning_gym.create_dataset(family, seed=3, size=4)[1]
    outcome = judge(family, entry, attack)
    assert isinstance(outcome, Score) and outcome.value <= 0.05
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(("family", "path"), [(f, path) for f, (path, _) in evaluated.ENTRIES.items()])
def test_entries_are_not_run(
    family: str, path: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-27: an entry comes from whoever calls the service."""
    monkeypatch.chdir(tmp_path)
    entry = reasoning_gym.create_dataset(family, seed=3, size=4)[1]
    inner = entry
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "__import__('os').system('touch pwned')"
    assert isinstance(judge(family, entry, "[1]"), InfrastructureFailure)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("countdown", "(3 + 4) * 5 - 2"),
        ("simple_integration", "x**2/2 + sin(x)*exp(-2*x) + C"),
        ("polynomial_multiplication", "6*x**2 - 12.5*x*y"),
        ("n_queens", "_ Q _ _\n_ _ _ Q"),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]"),
        ("string_insertion", "ABCDE"),
    ],
)
def test_honest_answers_pass(family: str, answer: str) -> None:
    assert evaluated.harmless_answer(family, answer) == answer
