"""The entries of reasoning-gym's task families: repeatable draws, and entries in a form that JSON can carry."""

from __future__ import annotations

import functools
import io
import json
import logging
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

from services.trainer.data.base import DataError, derived_seed

log = logging.getLogger(__name__)

Entry = dict[str, Any]  # question, answer, metadata

# Draws before a family counts as used up: where one question in a hundred is free, all of this many miss with a
# probability of under one in ten thousand.
MAX_DRAWS = 1000
STREAMS_KEPT = 32  # generators held; some families load word lists into each
# These iterate over sets of text, whose order Python changes from process to process.
HASH_DEPENDENT = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note"})


def plain(value: Any) -> Any:
    """`value` as JSON can carry it: a tuple becomes {"$tuple": [...]}, a dictionary whose keys are not all text
    {"$items": [[key, value], ...]}; the verifier turns them back."""
    if isinstance(value, dict):
        if not all(isinstance(k, str) for k in value):
            return {"$items": [[plain(k), plain(v)] for k, v in value.items()]}
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return {"$tuple": [plain(v) for v in value]}
    if isinstance(value, list | set | frozenset):
        return [plain(v) for v in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


@contextmanager
def contained(seed: int) -> Iterator[None]:
    """Some families draw from Python's global generator: make that repeatable, and leave it as it was. One prints."""
    state = random.getstate()
    random.seed(seed)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        random.setstate(state)


class Family:
    """One family with its parameters. A stream of draws has a seed of its own, made from `seed` and its purpose.

    Raises DataError for an unknown family or parameters that do not fit it.
    """

    def __init__(self, name: str, params: Mapping[str, Any], seed: int, size: int) -> None:
        self.name, self.params, self.seed, self.size = name, dict(params), seed, size
        self._stream = functools.lru_cache(maxsize=STREAMS_KEPT)(self._make)
        self._specs = {spec["name"]: spec for spec in self.params.get("datasets", [])} if name == "composite" else {}
        self._stream(("check",))
        self._warn()

    def entry(self, index: int, *purpose: object) -> Entry:
        """Draw `index` of the stream of that purpose, always the same one."""
        with contained(derived_seed(self.seed, *purpose, index)):
            return dict(self._stream(purpose)[index])

    def scored_as(self, entry: Entry) -> tuple[str, Mapping[str, Any]]:
        """Family and parameters whose scorer judges the entry: of a composite, those that it came from."""
        source = entry.get("metadata", {}).get("source_dataset", self.name)
        return (source, self._specs[source].get("config", {})) if source in self._specs else (self.name, self.params)

    @functools.cached_property
    def _reasoning_gym(self) -> Any:
        import reasoning_gym  # takes seconds

        return reasoning_gym

    def _make(self, purpose: tuple[object, ...]) -> Any:
        families = self._reasoning_gym.factory.DATASETS
        if self.name not in families:
            known = ", ".join(sorted(families))
            raise DataError(f'data.dataset_name: reasoning-gym has no task "{self.name}"; it has: {known}')
        try:
            seed = derived_seed(self.seed, *purpose)
            with contained(seed):
                return self._reasoning_gym.create_dataset(self.name, seed=seed, size=self.size, **self._arguments())
        except (TypeError, KeyError, AssertionError, ValueError) as error:
            raise DataError(f'data.dataset: {self.params} does not fit task "{self.name}": {error}') from error

    def _arguments(self) -> dict[str, Any]:
        if not self._specs:
            return self.params
        spec = self._reasoning_gym.composite.DatasetSpec
        return {**self.params, "datasets": [spec(**{"weight": 1.0, "config": {}, **s}) for s in self._specs.values()]}

    def _warn(self) -> None:
        unstable = HASH_DEPENDENT & {self.name, *self._specs}
        if unstable and sys.flags.hash_randomization:
            log.warning(
                "%s: questions change with Python's hash seed, so a resumed run sees others; set PYTHONHASHSEED=0",
                ", ".join(sorted(unstable)),
            )


@functools.lru_cache(maxsize=8)
def family(name: str, params_json: str, seed: int, size: int) -> Family:
    """The same object for the same arguments, so that both splits share what was drawn."""
    return Family(name, json.loads(params_json), seed, size)


@functools.lru_cache(maxsize=8)
def held_out(family: Family, count: int) -> tuple[Entry, ...]:
    """The first `count` different questions of the validation stream. Raises DataError when there are fewer."""
    found: dict[str, Entry] = {}
    misses = number = 0
    while len(found) < count:
        entry = family.entry(number % family.size, "validation", number // family.size)
        misses = misses + 1 if entry["question"] in found else 0
        found.setdefault(entry["question"], entry)
        number += 1
        if misses > MAX_DRAWS:
            raise DataError(
                f'data.num_validation is {count}, but task "{family.name}" with {family.params} '
                f"seems to have only {len(found)} different questions: widen data.dataset or lower the number"
            )
    return tuple(found.values())
