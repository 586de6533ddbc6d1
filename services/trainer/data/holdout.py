"""Keeping training and validation apart when both come from rows in memory."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace

from services.trainer.data.base import DataError, Item, derived_seed

log = logging.getLogger(__name__)


class ListDataset:
    """Items held in memory, numbered by their place."""

    def __init__(self, name: str, items: Sequence[Item]) -> None:
        self._name = name
        self._items = [replace(item, index=index) for index, item in enumerate(items)]

    @property
    def name(self) -> str:
        return self._name

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        return self._items[index]


def key(item: Item) -> tuple[tuple[str, str], ...]:
    """What makes two prompts the same: their text."""
    return tuple((m["role"], " ".join(m["content"].split())) for m in item.messages)


def without(items: Sequence[Item], held_out: Sequence[Item], name: str) -> list[Item]:
    """`items` less those whose prompt is in `held_out`. Raises DataError when none is left."""
    keys = {key(item) for item in held_out}
    kept = [item for item in items if key(item) not in keys]
    if len(kept) < len(items):
        log.info("%s: %d rows are also validation prompts and are not trained on", name, len(items) - len(kept))
    if not kept:
        raise DataError(f"{name}: every row is also a validation prompt; nothing is left to train on")
    return kept


def choose(items: Sequence[Item], count: int, seed: int, name: str) -> list[Item]:
    """`count` items with different prompts, the same ones for the same seed. Raises DataError when there are fewer."""
    distinct = list({key(item): item for item in reversed(items)}.values())[::-1]
    if count >= len(distinct) and count > 0:
        raise DataError(
            f"{name}: has {len(distinct)} different prompts, so data.num_validation={count} leaves none to train on; "
            "lower it, or give data.validation_file"
        )
    return random.Random(derived_seed(seed, "validation")).sample(distinct, count)
