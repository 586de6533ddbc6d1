"""Answers to reasoning-gym's procedural tasks, judged by the library's own scorer of each task family."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import Field

from services.reward.verifiers.base import InfrastructureFailure, Outcome, Payload, Request, Score
from services.reward.verifiers.text import Extraction, extract


class ReasoningGymPayload(Payload):
    dataset: str = Field(description="reasoning-gym task family, such as chain_sum")
    entry: dict[str, Any] = Field(description='the entry as generated; a tuple is written {"$tuple": [...]}')
    params: dict[str, Any] = Field(default_factory=dict, description="parameters that the family was created with")
    extraction: Extraction = Field(default="raw", description="where the answer stands: raw, last_line, answer_tags")


def restore_tuples(value: Any) -> Any:
    """The entry as the library made it: JSON knows no tuples, and some scorers compare with them."""
    if isinstance(value, list):
        return [restore_tuples(v) for v in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"$tuple"}:
        return tuple(restore_tuples(v) for v in value["$tuple"])
    return {k: restore_tuples(v) for k, v in value.items()}


@functools.lru_cache(maxsize=64)
def scorer(dataset: str, params_json: str) -> Callable[[str | None, dict[str, Any]], float]:
    """The family's score_answer(answer, entry). Raises ValueError for an unknown family."""
    import reasoning_gym

    params = {k: v for k, v in json.loads(params_json).items() if k not in ("seed", "size")}
    return reasoning_gym.create_dataset(dataset, seed=0, size=1, **params).score_answer


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
        answer = extract(request.response_text, task.extraction)
        if answer is None:
            return Score(0.0, extracted=False)
        return Score(float(judge(answer, restore_tuples(task.entry))))
