"""Rules across keys, each with a name, checked together before anything starts.

A rule is a function that yields one sentence for each way in which it is broken: both keys with their values, then the
nearest legal thing. Add one by decorating it in the module of its subject.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trireme.config.rules import layout, lengths, objective, run
from trireme.config.rules.registry import Rule

if TYPE_CHECKING:
    from trireme.config.root import Config

RULES: tuple[Rule, ...] = (*layout.RULES, *objective.RULES, *lengths.RULES, *run.RULES)


def violations(config: Config) -> list[str]:
    """One sentence for each rule that is broken, led by the rule's name."""
    return [f"rule {rule.name}: {text}" for rule in RULES for text in rule.check(config)]
