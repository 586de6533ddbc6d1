"""pydantic's errors in words for the person who wrote the file: key, value, what would be right."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a block of keys",
    "model_type": "a block of keys",
    "finite_number": "a finite number",
}


def problems_of(error: ValidationError) -> list[str]:
    """One sentence for each error."""
    return [text for details in error.errors() for text in _problems(details)]


def _problems(details: ErrorDetails) -> list[str]:
    if details["type"] == "config":
        problems: list[str] = details.get("ctx", {}).get("problems", [details["msg"]])
        return problems
    key = ".".join(str(part) for part in details["loc"])
    if details["type"] == "missing":
        return [f"{key} is required"]
    return [f"{key}: {_show(details['input'])} is not valid; it should be {_expected(details)}"]


def _show(value: Any) -> str:
    return "null" if value is None else repr(value)


def _expected(details: ErrorDetails) -> str:
    known = EXPECTED.get(details["type"])
    return known or details["msg"].removeprefix("Input should be ").removeprefix("a valid ")
