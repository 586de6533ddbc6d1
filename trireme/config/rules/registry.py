"""What a rule is, and how a module of rules lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trireme.config.root import Config

Check = Callable[["Config"], Iterator[str]]


@dataclass(frozen=True)
class Rule:
    """A name and the function that yields what is wrong."""

    name: str
    check: Check

    @property
    def summary(self) -> str:
        """The rule in one sentence: what its function says of itself."""
        return (self.check.__doc__ or "").strip()


def rule_into(rules: list[Rule]) -> Callable[[str], Callable[[Check], Check]]:
    """A decorator that appends to `rules` the function that it decorates, under a name."""

    def named(name: str) -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            rules.append(Rule(name, check))
            return check

        return add

    return named


def nearest_multiple(value: int, of: int) -> int:
    """The positive multiple of `of` that is nearest to `value`."""
    return max(1, round(value / of)) * of
