"""pydantic's errors in words for the person who wrote the file: key, value, what would be right."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trireme.config import schema
from trireme.config.base import Block
from trireme.config.secrets import is_secret, mask_value

EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a block of keys",
    "model_type": "a block of keys",
    "finite_number": "a finite number",
}


def problems_of(model: type[Block], error: ValidationError, prefix: str = "") -> list[str]:
    """One sentence for each error; `prefix` is the dotted path of the value that was validated."""
    return [text for details in error.errors() for text in _problems(model, details, prefix)]


def _problems(model: type[Block], details: ErrorDetails, prefix: str) -> list[str]:
    if details["type"] == "config":
        problems: list[str] = details.get("ctx", {}).get("problems", [details["msg"]])
        return problems
    key = ".".join(str(part) for part in (*prefix.split("."), *details["loc"]) if part != "")
    if details["type"] == "missing":
        return [f"{key} is required: {_meaning(model, key)}"]
    value = mask_value(details["input"]) if is_secret(key) else details["input"]
    return [f"{key}: {_show(value)} is not valid; it should be {_expected(details, _meaning(model, key))}"]


def _meaning(model: type[Block], key: str) -> str:
    try:
        return schema.find(model, key).description or ""
    except KeyError:  # an item within a value, such as the third stop string
        return ""


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def _expected(details: ErrorDetails, meaning: str) -> str:
    known = EXPECTED.get(details["type"])
    if known:
        return known
    if details["type"] == "string_pattern_mismatch":
        return f"text that matches {details['ctx']['pattern']} ({meaning})"
    return details["msg"].removeprefix("Input should be ").removeprefix("a valid ") + _nearest(details)


def _nearest(details: ErrorDetails) -> str:
    """The choice that was probably meant, where there are choices."""
    choices = str(details.get("ctx", {}).get("expected", "")).replace(" or ", ", ").replace("'", "").split(", ")
    if details["type"] != "literal_error" or not isinstance(details["input"], str):
        return ""
    near = difflib.get_close_matches(details["input"], choices, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
