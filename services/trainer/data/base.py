"""The Dataset port: prompts with what is needed to judge their answers. One file per kind of source beside this one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
Message = dict[str, str]  # role, content


class DataError(ValueError):
    """A dataset cannot be used; the message names the key, file and row, and says what would be right."""


@dataclass(frozen=True)
class Task:
    """How an answer is judged: the verifier's name and its payload, a JSON-able object."""

    verifier: str
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """One prompt as a conversation without a reply. `index` is its place in the dataset."""

    messages: list[Message]
    task: Task
    index: int


class Dataset(Protocol):
    """Items by number; the same number always gives the same item."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item: ...


def derived_seed(seed: int, *purpose: object) -> int:
    """A 32-bit seed for one purpose, unrelated to those of other purposes and other seeds."""
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
