"""Verifiers that cannot be used, each in its own way."""

from __future__ import annotations

from services.reward.verifiers.exact import Exact, ExactPayload


class NoVersion:
    name = "no_version"
    schema = ExactPayload
    stateless = True

    def score(self, request: object) -> None: ...


class OtherSchema(Exact):
    name = "other_schema"
    schema = dict  # type: ignore[assignment]


class NeedsArguments(Exact):
    name = "needs_arguments"

    def __init__(self, path: str) -> None:
        self.path = path


class Taken(Exact):
    pass


NOT_A_CLASS = 3
