"""Prompts from a procedural task family of reasoning-gym, made as they are needed.

Training and validation come from different seeds, which alone would not keep them apart: a family with a small space
(the sums of two digits) repeats itself under any seed. So validation is a set of distinct questions, drawn first, and a
training item whose question is among them is drawn again.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from services.trainer.data.base import DataError, Item, Split, Task, derived_seed

PREFIX = "reasoning_gym/"
DEFAULT_SIZE = 10_000
# Draws per item before a family counts as used up: with a fraction p of its questions free, all of this many fail
# with probability (1-p)^1000, under one in ten thousand for p = 1 %.
MAX_DRAWS = 1000


def plain(value: Any) -> Any:
    """`value` as JSON can carry it; a tuple becomes {"$tuple": [...]}, as some scorers compare with tuples."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return {"$tuple": [plain(v) for v in value]}
    if isinstance(value, list | set | frozenset):
        return [plain(v) for v in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return value.item() if hasattr(value, "item") else str(value)


@contextmanager
def fixed_global_random(seed: int) -> Iterator[None]:
    """Some families draw from Python's global generator: make that repeatable, and leave it as it was."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


class Family:
    """The entries of one task family with its parameters, by stream (a seed of its own) and index."""

    def __init__(self, name: str, params: Mapping[str, Any], seed: int, size: int) -> None:
        self.name, self.params, self.seed, self.size = name, dict(params), seed, size
        self._stream = functools.lru_cache(maxsize=MAX_DRAWS)(self._make)
        self._stream(("check",))

    def _make(self, purpose: tuple[object, ...]) -> Any:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if self.name not in DATASETS:
            known = ", ".join(sorted(DATASETS))
            raise DataError(f'data.dataset_name: reasoning-gym has no task "{self.name}"; it has: {known}')
        try:
            seed = derived_seed(self.seed, *purpose)
            return reasoning_gym.create_dataset(self.name, seed=seed, size=self.size, **self.params)
        except (TypeError, AssertionError, ValueError) as error:
            raise DataError(f'data.dataset: parameters {self.params} do not fit task "{self.name}": {error}') from error

    def entry(self, index: int, *purpose: object) -> dict[str, Any]:
        with fixed_global_random(derived_seed(self.seed, *purpose, index)):
            return dict(self._stream(purpose)[index])


class ReasoningGymDataset:
    """One split of a family. Raises DataError for an unknown family, bad parameters, or a family too small to split."""

    def __init__(
        self,
        family: str,
        params: Mapping[str, Any],
        split: Split,
        seed: int,
        *,
        num_validation: int,
        verifier: str = "reasoning_gym",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        size = int(params.get("size", DEFAULT_SIZE))
        own_seed = int(params.get("seed", seed))
        rest = {k: v for k, v in params.items() if k not in ("size", "seed")}
        self._family = Family(family, rest, own_seed, max(size, num_validation))
        self._size, self._verifier, self._options = size, verifier, dict(options or {})
        self._validation = self._draw_validation(num_validation)
        self._held_out = {e["question"] for e in self._validation}
        self._split = split

    @property
    def name(self) -> str:
        return PREFIX + self._family.name

    def __len__(self) -> int:
        return len(self._validation) if self._split == "validation" else self._size

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < len(self):
            raise IndexError(index)
        entry = self._validation[index] if self._split == "validation" else self._draw_training(index)
        payload = {"dataset": self._family.name, "entry": plain(entry), "params": self._family.params}
        task = Task(self._verifier, {**payload, **self._options})
        return Item([{"role": "user", "content": entry["question"]}], task, index)

    def _draw_validation(self, count: int) -> list[dict[str, Any]]:
        """The first `count` distinct questions of the validation stream."""
        found: dict[str, dict[str, Any]] = {}
        misses = number = 0
        while len(found) < count:
            entry = self._family.entry(number % self._family.size, "validation", number // self._family.size)
            number += 1
            misses = misses + 1 if entry["question"] in found else 0
            found.setdefault(entry["question"], entry)
            if misses > MAX_DRAWS:
                raise DataError(
                    f'data.num_validation is {count}, but task "{self._family.name}" with {self._family.params} '
                    f"seems to have only {len(found)} different questions: widen data.dataset or lower the number"
                )
        return list(found.values())

    def _draw_training(self, index: int) -> dict[str, Any]:
        for draw in range(MAX_DRAWS):
            entry = self._family.entry(index, "train", draw)
            if entry["question"] not in self._held_out:
                return entry
        raise DataError(
            f'data.num_validation of {len(self._held_out)} leaves task "{self._family.name}" with '
            f"{self._family.params} no question to train on: widen data.dataset or lower the number"
        )
