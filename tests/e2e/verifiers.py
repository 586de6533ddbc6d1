"""A reward that even a random model can learn: the share of its characters that are among the wanted ones."""

from __future__ import annotations

from typing import ClassVar

from services.reward.verifiers.base import Payload, Request, Score


class WantedPayload(Payload):
    """answer: the characters that count."""

    answer: str


class Wanted:
    """Named in a configuration as `reward.verifiers: ["tests.e2e.verifiers:Wanted"]`."""

    name: ClassVar[str] = "wanted"
    version: ClassVar[str] = "1"
    schema: ClassVar[type[Payload]] = WantedPayload
    stateless: ClassVar[bool] = True

    def score(self, request: Request) -> Score:
        assert isinstance(request.payload, WantedPayload)
        text = request.response_text
        return Score(sum(character in request.payload.answer for character in text) / max(1, len(text)))
