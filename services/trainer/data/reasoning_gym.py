"""Prompts from a procedural task family of reasoning-gym, made as they are needed.

Training and validation come from different seeds, which alone would not keep them apart: a family with a small space
(the sums of two digits) repeats itself under any seed. So validation is a set of different questions, drawn first, and
a training item whose question is among them is drawn again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from services.trainer.data.base import DataError, Item, Split, Task
from services.trainer.data.families import MAX_DRAWS, Entry, family, held_out, plain

PREFIX = "reasoning_gym/"
VERIFIER = "reasoning_gym"
DEFAULT_SIZE = 10_000


class ReasoningGymDataset:
    """One split of a family. `params` may also hold `size`, the items of an epoch, and `seed`.

    verifier: another than the family's own scorer is given the answer alone. options: added to each payload.
    Raises DataError for an unknown family, parameters that do not fit, or too few questions for both splits.
    """

    def __init__(
        self,
        name: str,
        params: Mapping[str, Any],
        split: Split,
        seed: int,
        *,
        num_validation: int,
        verifier: str = VERIFIER,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        rest = {k: v for k, v in params.items() if k not in ("size", "seed")}
        self._size = _whole("size", params.get("size", DEFAULT_SIZE))
        own_seed = _whole("seed", params.get("seed", seed))
        self._family = family(name, json.dumps(rest, sort_keys=True), own_seed, max(self._size, num_validation))
        self._validation = held_out(self._family, num_validation)
        self._held_out = {entry["question"] for entry in self._validation}
        self._split, self._verifier, self._options = split, verifier, dict(options or {})

    @property
    def name(self) -> str:
        return PREFIX + self._family.name

    def __len__(self) -> int:
        return len(self._validation) if self._split == "validation" else self._size

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < len(self):
            raise IndexError(index)
        entry = self._validation[index] if self._split == "validation" else self._draw(index)
        return Item([{"role": "user", "content": entry["question"]}], self._task(entry), index)

    def _draw(self, index: int) -> Entry:
        for draw in range(MAX_DRAWS):
            entry = self._family.entry(index, "train", draw)
            if entry["question"] not in self._held_out:
                return entry
        raise DataError(
            f'data.num_validation of {len(self._held_out)} leaves task "{self._family.name}" with '
            f"{self._family.params} no question to train on: widen data.dataset or lower the number"
        )

    def _task(self, entry: Entry) -> Task:
        if self._verifier != VERIFIER:
            return Task(self._verifier, {"answer": entry["answer"], **self._options})
        scorer, params = self._family.scored_as(entry)
        return Task(VERIFIER, {"dataset": scorer, "entry": plain(entry), "params": dict(params), **self._options})


def _whole(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < (key == "size"):
        raise DataError(f"data.dataset.{key}: {value!r} should be a whole number{', at least 1' * (key == 'size')}")
    return value
