"""Verifiers by name: the built-in ones and those that the configuration names as "package.module:Class"."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence

from pydantic import BaseModel

from services.reward.verifiers.base import Verifier

BUILTIN = (
    "services.reward.verifiers.exact:Exact",
    "services.reward.verifiers.math:Math",
    "services.reward.verifiers.reasoning_gym:ReasoningGym",
)


class VerifierError(ValueError):
    """A verifier cannot be loaded or is not known; the message says what would be right."""


def load(path: str) -> Verifier:
    """The verifier that "package.module:Class" names. Raises VerifierError."""
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise VerifierError(f'reward.verifiers: "{path}" should read "package.module:Class"')
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a folder of the user's called `services` is not ours
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise VerifierError(
            f'reward.verifiers: cannot import "{module_name}" for "{path}": {type(error).__name__}: {error}; modules '
            f"are looked for where Python's are, in PYTHONPATH and in {os.getcwd()}"
        ) from error
    if not hasattr(module, class_name):
        raise VerifierError(f'reward.verifiers: "{path}": module "{module_name}" has no "{class_name}"')
    return _instance(path, getattr(module, class_name))


def _instance(path: str, cls: object) -> Verifier:
    if not isinstance(cls, type):
        raise VerifierError(f'reward.verifiers: "{path}" is not a class')
    missing = [a for a in ("name", "version", "schema", "stateless", "score") if not hasattr(cls, a)]
    if missing:
        raise VerifierError(f'reward.verifiers: "{path}" lacks {", ".join(missing)} of the Verifier port')
    schema = getattr(cls, "schema", None)
    if not (isinstance(schema, type) and issubclass(schema, BaseModel)):
        raise VerifierError(f'reward.verifiers: "{path}".schema should be a pydantic model class')
    try:
        return cls()
    except Exception as error:  # a user's constructor may raise anything
        raise VerifierError(
            f'reward.verifiers: "{path}" cannot be made without arguments: {type(error).__name__}: {error}'
        ) from error


class Registry:
    """All verifiers of one service, by name. Raises VerifierError when a path is bad or two share a name."""

    def __init__(self, user_paths: Sequence[str] = ()) -> None:
        self.user_paths = tuple(user_paths)
        self._by_name: dict[str, Verifier] = {}
        for path in (*BUILTIN, *self.user_paths):
            self._add(path, load(path))

    def _add(self, path: str, verifier: Verifier) -> None:
        if verifier.name in self._by_name:
            raise VerifierError(f'reward.verifiers: "{path}" is called "{verifier.name}", a name already taken')
        self._by_name[verifier.name] = verifier

    def __iter__(self) -> Iterator[Verifier]:
        return iter(self._by_name.values())

    def names(self) -> list[str]:
        return sorted(self._by_name)

    def get(self, name: str) -> Verifier:
        """Raises VerifierError that lists the known names."""
        if name not in self._by_name:
            raise VerifierError(f'unknown verifier "{name}"; known: {", ".join(self.names())}')
        return self._by_name[name]
