"""Unknown keys, and the known name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from trireme.config import schema
from trireme.config.base import Block
from trireme.config.errors import ConfigError


def check_names(model: type[Block], user: dict[str, Any]) -> None:
    """Raise ConfigError that names every unknown key by its full path, with the nearest known one.

    A plain value where a block of keys belongs is refused here too: references into it would only confuse.
    """
    problems = list(_problems(model, user))
    if problems:
        raise ConfigError(problems)


def _problems(root: type[Block], user: dict[str, Any]) -> Iterator[str]:
    for path, value, field in visit(root, user):
        if field is None:
            yield f"unknown key {path}; {suggest(root, path)}"
        elif schema.inner_blocks(field.annotation) and value is not None and not isinstance(value, dict):
            yield f"{path}: {value!r} is not valid; it should be a block of keys"


def visit(model: type[Block], user: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, FieldInfo | None]]:
    """(path, value, field or None where the block has no such key) for each key, outer blocks first."""
    for name, value in user.items():
        path, field = f"{prefix}{name}", model.model_fields.get(str(name))
        yield path, value, field
        if field is not None and isinstance(value, dict):
            yield from _visit_below(field.annotation, value, path)


def _visit_below(annotation: Any, value: dict[str, Any], path: str) -> Iterator[tuple[str, Any, FieldInfo | None]]:
    inner, named = schema.block_of(annotation), schema.named_blocks_of(annotation)
    if inner:
        yield from visit(inner, value, f"{path}.")
    elif named:
        for label, item in value.items():
            yield from visit(named, item if isinstance(item, dict) else {}, f"{path}.{label}.")


def suggest(root: type[Block], path: str) -> str:
    """What was probably meant by an unknown path."""
    parent, _, name = path.rpartition(".")
    block = schema.block_at(root, parent)
    known = list(block.model_fields) if block else []
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if nearest:
        return f"did you mean {parent + '.' if parent else ''}{nearest[0]}?"
    elsewhere = _elsewhere(root, name)
    if elsewhere:
        return f"did you mean {elsewhere}?"
    return f"{parent or 'the top level'} has {', '.join(known) or 'no such key'}"


def _elsewhere(root: type[Block], name: str) -> str | None:
    """A key of that or nearly that name in another block."""
    leaves = {path.rpartition(".")[2]: path for path in reversed(schema.paths(root))}
    nearest = difflib.get_close_matches(name, leaves, n=1, cutoff=0.75)
    return leaves[nearest[0]] if nearest else None
