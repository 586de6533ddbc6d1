"""Families of reasoning-gym whose scorers evaluate text as Python, and what may be given to them.

Those scorers call `eval` or sympy's `parse_expr` (which calls it) on the answer, so that a model could run code in the
scoring process. The table says for each such family what its texts must look like; anything else is not passed on.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_LENGTH = 10_000

_TRIGONOMETRY = {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh"}
_NAMES = _TRIGONOMETRY | {"exp", "log", "ln", "sqrt", "Abs", "abs", "pi", "oo", "zoo", "nan"}
_FORMULA = re.compile(r"[\w\s+\-*/^().,!=]*")
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_ATTRIBUTE = re.compile(r"\.\s*[^\W\d]")
_BOARD = re.compile(r"[A-Z\d_\s]*")
_BITS = re.compile(r"[0-9a-fA-FxX\s+\-*/%&|^~<>()]*")


def literal(text: str) -> bool:
    """A Python literal, or a board or word of capitals, digits and blanks; no name of a variable in the scorer, such
    as `entry["answer"]`, which would be worth a reward."""
    if _BOARD.fullmatch(text):
        return True
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def expression(text: str) -> bool:
    """Numbers, operators, one-letter variables and well-known functions; no attributes, strings or brackets."""
    names = set(_IDENTIFIER.findall(text))
    known = all(len(name) == 1 or name in _NAMES for name in names)
    return known and _FORMULA.fullmatch(text) is not None and _ATTRIBUTE.search(text) is None


def bits(text: str) -> bool:
    """Integers, decimal or hexadecimal, and operators."""
    return _BITS.fullmatch(text) is not None


Rule = Callable[[str], bool]
ANSWERS: Mapping[str, Rule] = {
    "binary_matrix": literal,
    "n_queens": literal,
    "spiral_matrix": literal,
    "string_insertion": literal,
    "countdown": expression,
    "intermediate_integration": expression,
    "polynomial_multiplication": expression,
    "puzzle24": expression,
    "simple_integration": expression,
}
# Of the entry, by the path of the text in it: it comes from whoever calls the service.
ENTRIES: Mapping[str, tuple[tuple[str, ...], Rule]] = {
    "number_sorting": (("answer",), literal),
    "polynomial_multiplication": (("answer",), expression),
    "bitwise_arithmetic": (("metadata", "problem"), bits),
    "intermediate_integration": (("metadata", "integrand"), expression),
    "simple_integration": (("metadata", "integrand"), expression),
}
# Wrong in every family, and no code: what a scorer is given in place of an answer that it must not evaluate.
NONSENSE = ")"


def harmless_answer(family: str, answer: str) -> str:
    """The answer, or NONSENSE when the family's scorer would evaluate what it must not."""
    rule = ANSWERS.get(family)
    return answer if rule is None or (len(answer) <= MAX_LENGTH and rule(answer)) else NONSENSE


def harmless_entry(family: str, entry: Mapping[str, Any]) -> bool:
    """Whether the family's scorer evaluates nothing in the entry that it must not."""
    if family not in ENTRIES:
        return True
    path, rule = ENTRIES[family]
    value: Any = entry
    for key in path:
        value = value.get(key, "") if isinstance(value, Mapping) else ""
    return rule(str(value))
