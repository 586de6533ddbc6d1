"""Formulas as text and as sympy expressions: reading them whole or not at all, and comparing them.

Nothing here evaluates model text as Python, and nothing is computed that `cost` finds excessive.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from services.reward.verifiers import cost
from services.reward.verifiers.text import closing_brace

MAX_LENGTH = 400  # characters of an answer; longer ones equal only their own text
RELATIVE_TOLERANCE = 1e-5  # of numbers of which one is a decimal; math-verify rounds to 6 places besides
PERCENT = 100

_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|\\,|\\!|\s|,\\!\s?|,)\d{3})+(?!\d)")
_DECIMAL_COMMA = re.compile(r"-?\d{4,},\d{2}")  # shorter ones read as lists
_MIXED = re.compile(r"(?<![\d.,/^_])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.,])")
_WORDS = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")


def load() -> None:
    """Import sympy and math-verify, which takes seconds."""
    import math_verify  # noqa: F401

    # It warns once per process that its own (signal) time limit is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    parse(r"\frac{1}{2}")  # the parser's first formula takes a second, which is not the answer's fault


def is_prose(text: str) -> bool:
    """Words without a number or a LaTeX command: the parser would read them as products of letters."""
    return not text.strip() or (_WORDS.search(text) is not None and not re.search(r"[\d\\]", text))


def find(text: str) -> str | None:
    """The formula or number that math-verify takes for the answer of a text without a box."""
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig, get_extraction_regexes

    tail = clean(text[-MAX_LENGTH:])
    groups = get_extraction_regexes((LatexExtractionConfig(), ExprExtractionConfig()))
    patterns = [(regex, priority) for regexes, _ in groups for regex, priority in regexes]
    for wanted in sorted({priority for _, priority in patterns}):
        matches = [m for regex, priority in patterns if priority == wanted for m in regex.finditer(tail)]
        if matches:
            return _answer_in(max(matches, key=lambda m: (m.end(), -m.start())))
    return None


def _answer_in(match: re.Match[str]) -> str:
    """The formula in a match of math-verify's expressions, without the words that led to it."""
    parts = {name: value for name, value in match.groupdict().items() if value}
    latex = [value for name, value in parts.items() if "latex" in name]
    numbers = [value for name, value in parts.items() if name.startswith(("integer", "decimal"))]
    answer = " , ".join(latex) or parts.get("expr") or "".join(numbers)
    return answer + ("\\%" if any("percent" in name for name in parts) else "")


def clean(text: str) -> str:
    r"""Notation that the parser would misread, written so that it does not: thousands, `\sqrt(2)`, `4 4/9`, `\$`."""
    text = text.replace(r"\$", "").replace(r"\fbox", r"\boxed").replace("\u2212", "-").replace("\u00a0", " ")
    text = _MIXED.sub(r"(\1+\2/\3)", _braces_for_parentheses(text))
    if _DECIMAL_COMMA.fullmatch(text.strip()):
        return text.replace(",", ".")
    return _THOUSANDS.sub(lambda m: m[0] if _is_list(m) else re.sub(r"\D", "", m[0]), text)


def _is_list(match: re.Match[str]) -> bool:
    """Whether commas part members, as in `(100,200)`: in brackets, unless a comma and a blank part other members."""
    before, after = match.string[: match.start()], match.string[match.end() :]
    opening = re.search(r"[(\[{]([^()\[\]{}]*)$", before)
    closing = re.match(r"([^()\[\]{}]*)[)\]}]", after)
    return opening is not None and closing is not None and ", " not in opening[1] + closing[1] and "," in match[0]


def _braces_for_parentheses(text: str) -> str:
    r"""`\sqrt(x)` and `\frac(a)(b)` with the braces that LaTeX wants."""
    for command in (r"\sqrt", r"\frac", r"\dfrac", r"\tfrac"):
        at = text.find(command + "(")
        while at >= 0:
            start = at + len(command)
            while start < len(text) and text[start] == "(":
                end = closing_brace(text, start, "()")
                if end is None:
                    break
                text = f"{text[:start]}{{{text[start + 1 : end]}}}{text[end + 1 :]}"
                start = end + 1
            at = text.find(command + "(", at + 1)
    return text


def parse(answer: str) -> list[Any]:
    """The sympy expression of an answer, in a list; empty when it is none, not read whole, or too costly."""
    from math_verify import parse as parse_text
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    text = clean(answer.strip().strip("$").strip()).strip("*").rstrip(".").strip()
    if not text or len(text) > MAX_LENGTH or cost.deep(text):
        return []
    options: Any = {"parsing_timeout": None, "fallback_mode": "no_fallback"}
    found = parse_text(f"${text}$", [LatexExtractionConfig()], **options) if read_whole(text) else []
    if not found and "\\" not in text:
        found = parse_text(text, [ExprExtractionConfig()], **options)
    return [] if any(cost.excessive(expression) for expression in found) else list(found)


def read_whole(text: str) -> bool:
    """Whether the LaTeX parser consumes all of `text`: it stops in silence where it cannot go on."""
    from antlr4 import Token
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy, normalize_latex
    from math_verify.parser import LatexExtractionConfig

    normal = normalize_latex(text, config=LatexExtractionConfig().normalization_config)
    parser = _Latex2Sympy().create_parser(normal)
    try:
        parser.math()
    except Exception:  # its error listener raises plain Exception on a syntax error
        return False
    return bool(parser.getTokenStream().LA(1) == Token.EOF)


def equal(gold: Sequence[Any], gold_text: str, answer: str) -> bool:
    """Whether an answer equals the reference, as text or as an expression."""
    from math_verify import verify

    if " ".join(answer.split()) == " ".join(gold_text.split()):
        return True
    found = parse(answer)
    if not found or _one_is_symbolic(gold[0], found[0]) or not verify(list(gold), found, timeout_seconds=None):
        return False
    factors = (1, PERCENT, 1 / PERCENT) if "%" in gold_text + answer else (1,)
    return not any(numbers_differ(g, f, factors) for g in gold for f in found)


def _one_is_symbolic(a: Any, b: Any) -> bool:
    """One is a number, the other a term with variables: never equal, and costly to find out."""
    from sympy import Expr

    if not (isinstance(a, Expr) and isinstance(b, Expr)):
        return False
    # A lone symbol may be text, such as \text{13}, which math-verify compares by name.
    return any(bool(x.args and x.free_symbols) and not y.free_symbols for x, y in ((a, b), (b, a)))


def numbers_differ(a: Any, b: Any, factors: Sequence[float] = (1,)) -> bool:
    """Both are plain numbers, and not the same by any factor: a veto where rounding would call them equal."""
    from sympy import Basic, Float

    if not (isinstance(a, Basic) and isinstance(b, Basic)):
        return False
    x, y = _number(a), _number(b)
    if x is None or y is None:
        return False
    inexact = a.has(Float) or b.has(Float)
    tolerance = RELATIVE_TOLERANCE if inexact else 1e-25
    return not any(abs(x * f - y) <= tolerance * max(abs(x * f), abs(y)) for f in factors)


def _number(expression: Any) -> Any:
    """Its value to 30 digits when it is a real number, else None."""
    if getattr(expression, "free_symbols", True) or not getattr(expression, "is_number", False):
        return None
    value = expression.doit().evalf(30)
    return value if value.is_Float or value.is_Integer else None
