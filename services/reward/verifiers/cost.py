"""What a formula would cost, before it is paid: a model may answer with one whose value fills the memory.

Two bounds. On the text: the LaTeX parser's time grows steeply with nested brackets. On the parsed, still unevaluated
expression: how many bits its numbers would have. The scoring pool's kill stands behind both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

MAX_BRACKETS = 6  # nested ( [ \{; an answer has two or three
MAX_BRACES = 20
MAX_BARS = 12
MAX_BITS = 1e5  # of any number on the way: some 30,000 digits
MAX_TERMS = 1e4  # of a sum, product or range
MAX_SYMBOLIC_POWER = 32  # of a sum such as (x + 1)^n
MAX_OPERATORS = 60  # powers and signs, in whose number the parser's time grows steeply too


def deep(text: str) -> bool:
    """Whether brackets are nested deeper, or operators more, than any answer needs."""
    text = text.replace(r"\{", "(").replace(r"\}", ")").replace(r"\left", "").replace(r"\right", "")
    brackets, braces = _depth(text, "([", ")]"), _depth(text, "{", "}")
    operators = sum(map(text.count, "^+-"))
    crowded = text.count("|") > MAX_BARS or operators > MAX_OPERATORS
    return crowded or brackets > MAX_BRACKETS or braces > MAX_BRACES


def _depth(text: str, opening: str, closing: str) -> int:
    """How deep brackets nest. Half-open intervals are why the two kinds of bracket count as one."""
    depth = deepest = 0
    for character in text:
        depth += (character in opening) - (character in closing)
        deepest = max(deepest, depth)
    return deepest


def excessive(expression: Any) -> bool:
    """Whether evaluating a sympy expression would make a number, or a number of terms, beyond all bounds."""
    try:
        return _bits(expression) > MAX_BITS
    except RecursionError:
        return True


def _bits(expression: Any) -> float:
    """An upper bound on log2 of the value of each number in the expression, as if symbols were small; inf when vast."""
    arguments: Iterable[Any] = getattr(expression, "args", ())
    if not arguments:
        return _leaf(expression)
    if _expands(expression):
        return math.inf
    sizes = [_bits(argument) for argument in arguments]
    if max(sizes) > MAX_BITS:
        return math.inf
    rule = _RULES.get(type(expression).__name__)
    return max(*sizes, rule(sizes)) if rule else sum(sizes)


def _expands(expression: Any) -> bool:
    """A high power of a sum with symbols, which simplifying multiplies out."""
    if type(expression).__name__ != "Pow":
        return False
    base, exponent = expression.args
    return bool(base.args and base.free_symbols) and _bits(exponent) > math.log2(MAX_SYMBOLIC_POWER)


def _leaf(expression: Any) -> float:
    if getattr(expression, "is_Rational", False):
        return math.log2(max(abs(int(expression.p)), 1)) + math.log2(int(expression.q))
    if getattr(expression, "is_Float", False):
        return math.log2(max(abs(float(expression)), 1))
    return 1.0


def _value(bits: float) -> float:
    """The largest value of so many bits; inf when it is beyond what any bound allows."""
    return 2.0**bits if bits < 64 else math.inf


def _power(sizes: list[float]) -> float:
    base, exponent = sizes
    return base * _value(exponent)


def _factorial(sizes: list[float]) -> float:
    value = _value(sizes[0])
    return value * sizes[0] if value < MAX_BITS else math.inf


def _many(sizes: list[float]) -> float:
    """A sum, product or range over limits: its terms, each as large as the largest part."""
    terms = _value(max(sizes[1:], default=0.0))
    return terms * sizes[0] if terms < MAX_TERMS else math.inf


_RULES: dict[str, Callable[[list[float]], float]] = {
    "Pow": _power,
    "exp": lambda sizes: 2 * _value(sizes[0]),
    "factorial": _factorial,
    "factorial2": _factorial,
    "subfactorial": _factorial,
    "gamma": _factorial,
    "binomial": lambda sizes: _factorial(sizes[:1]),
    "Sum": _many,
    "Product": _many,
    "Range": _many,
}
