"""The Verifier port: what judges one response and says why when it cannot.

Built-in verifiers are one file each beside this one. A user's verifier is any class of this shape, named in the
configuration as `reward.verifiers: ["package.module:Class"]`. Verifiers run in pool processes that may be killed at
any moment, so they need no timeouts of their own, must not use signals, and hold no state that matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True)
class Score:
    """How good the response is. `extracted` is False when no answer was found in it (the value is then usually 0)."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    extracted: bool = True


@dataclass(frozen=True)
class PolicyFailure:
    """The response itself cannot be judged: malformed or forbidden. It enters the gradient."""

    reason: str


@dataclass(frozen=True)
class InfrastructureFailure:
    """The judge failed, not the response: a broken reference answer, a missing resource. Never enters the gradient."""

    reason: str


Outcome = Score | PolicyFailure | InfrastructureFailure


class Payload(BaseModel):
    """Base of payload schemas: unknown fields are errors that name the field."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Request:
    """One response to judge. `payload` is an instance of the verifier's `schema`.

    `prompt_text` is there for verifiers that compare with the question; what the model is credited with must be in
    `response_text`. `finish_reason` is "stop", "length", "aborted" or "unspecified".
    """

    payload: BaseModel
    response_text: str
    prompt_text: str = ""
    finish_reason: str = "unspecified"


class Verifier(Protocol):
    """`name` is what tasks refer to; `version` changes whenever a score could. `schema` is the model
    of `Task.payload_json`. `stateless` promises that the same request always gives the same outcome.

    A verifier may also have `load()`, which imports what scoring needs: it is called in the scoring process before
    each score, outside the time limit."""

    name: ClassVar[str]
    version: ClassVar[str]
    schema: ClassVar[type[BaseModel]]
    stateless: ClassVar[bool]

    def score(self, request: Request) -> Outcome:
        """Judge one response. Anything raised counts as an infrastructure failure and is tried again."""
        ...
