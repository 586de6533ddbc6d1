"""Answers to reasoning-gym's procedural tasks, judged by the library's own scorer of each task family."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import Field

from services.reward.verifiers import evaluated
from services.reward.verifiers.base import InfrastructureFailure, Outcome, Payload, PolicyFailure, Request, Score
from services.reward.verifiers.text import Extraction, extract


class ReasoningGymPayload(Payload):
    dataset: str = Field(description="reasoning-gym task family, such as chain_sum")
    entry: dict[str, Any] = Field(description="the entry as generated; see `restored` for what JSON cannot write")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters that the family was created with")
    extraction: Extraction = Field(
        default="raw", description="where the answer stands: raw, last_line, last_number, answer_tags"
    )


def restored(value: Any) -> Any:
    """The entry as the library made it. JSON has no tuples and only text as keys, but some scorers compare with both:
    a tuple comes as {"$tuple": [...]}, a dictionary with other keys as {"$items": [[key, value], ...]}."""
    if isinstance(value, list):
        return [restored(v) for v in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"$tuple"}:
        return tuple(restored(v) for v in value["$tuple"])
    if set(value) == {"$items"}:
        return {restored(k): restored(v) for k, v in value["$items"]}
    return {k: restored(v) for k, v in value.items()}


Judge = Callable[[str | None, dict[str, Any]], float]


@functools.lru_cache(maxsize=64)
def scorer(dataset: str, params_json: str) -> Judge:
    """The family's score_answer(answer, entry). Raises ValueError for an unknown family."""
    import reasoning_gym

    params = {k: v for k, v in json.loads(params_json).items() if k not in ("seed", "size")}
    return reasoning_gym.create_dataset(dataset, seed=0, size=1, **params).score_answer


def _judged(judge: Judge, answer: str, entry: dict[str, Any]) -> Outcome:
    """The score. Some scorers raise on an answer of another form: the model's fault if they accept the reference."""
    try:
        return Score(float(judge(answer, entry)))
    except MemoryError:
        raise
    except Exception as error:  # whatever parsing a model's text may raise
        judge(entry.get("answer"), entry)
        return PolicyFailure(f"the answer is malformed: {type(error).__name__}: {error}"[:500])


class ReasoningGym:
    name: ClassVar[str] = "reasoning_gym"
    version: ClassVar[str] = "1"
    schema: ClassVar[type[ReasoningGymPayload]] = ReasoningGymPayload
    stateless: ClassVar[bool] = True

    def load(self) -> None:
        import reasoning_gym  # noqa: F401 (takes seconds; only a process that scores such a task pays for it)

    def score(self, request: Request) -> Outcome:
        task = request.payload
        assert isinstance(task, ReasoningGymPayload)
        try:
            judge = scorer(task.dataset, json.dumps(task.params, sort_keys=True))
        except (ValueError, TypeError, AssertionError) as error:
            return InfrastructureFailure(f'reasoning-gym cannot score "{task.dataset}": {error}')
        entry = restored(task.entry)
        if not evaluated.harmless_entry(task.dataset, entry):
            return InfrastructureFailure(f'the entry of "{task.dataset}" holds text that its scorer must not evaluate')
        answer = extract(request.response_text, task.extraction)
        if answer is None:
            return Score(0.0, extracted=False)
        return _judged(judge, evaluated.harmless_answer(task.dataset, answer), entry)
