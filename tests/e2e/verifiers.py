"""A reward that even a random model can learn: the share of its characters that are lower-case letters."""

from __future__ import annotations

from typing import ClassVar

from services.reward.verifiers.base import Payload, Request, Score


class LowerCase:
    """Named in a configuration as `reward.verifiers: ["tests.e2e.verifiers:LowerCase"]`."""

    name: ClassVar[str] = "lower_case"
    version: ClassVar[str] = "1"
    schema: ClassVar[type[Payload]] = Payload
    stateless: ClassVar[bool] = True

    def score(self, request: Request) -> Score:
        text = request.response_text
        return Score(sum("a" <= character <= "z" for character in text) / max(1, len(text)))
