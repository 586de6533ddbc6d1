"""Unknown keys, and the known name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from trireme.config import schema
from trireme.config.base import Block
from trireme.config.errors import ConfigError


def check_names(model: type[Block], user: dict[str, Any]) -> None:
    """Raise ConfigError that names every unknown key by its full path, with the nearest known one."""
    problems = [f"unknown key {path}; {_suggest(model, path, block)}" for path, block in _unknown(model, user)]
    if problems:
        raise ConfigError(problems)


def _unknown(model: type[Block], user: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, type[Block]]]:
    """(path, block that it stands in) for each key that its block does not have."""
    for name, value in user.items():
        path = f"{prefix}{name}"
        if name not in model.model_fields:
            yield path, model
        elif isinstance(value, dict):
            yield from _unknown_below(model.model_fields[name].annotation, value, path)


def _unknown_below(annotation: Any, value: dict[str, Any], path: str) -> Iterator[tuple[str, type[Block]]]:
    inner, named = schema.block_of(annotation), schema.named_blocks_of(annotation)
    if inner:
        yield from _unknown(inner, value, f"{path}.")
    elif named:
        for name, item in value.items():
            if isinstance(item, dict):
                yield from _unknown(named, item, f"{path}.{name}.")


def _suggest(root: type[Block], path: str, block: type[Block]) -> str:
    parent, _, name = path.rpartition(".")
    nearest = difflib.get_close_matches(name, block.model_fields, n=1, cutoff=0.6)
    if nearest:
        return f"did you mean {parent + '.' if parent else ''}{nearest[0]}?"
    elsewhere = _elsewhere(root, name)
    if elsewhere:
        return f"did you mean {elsewhere}?"
    return f"{parent or 'the top level'} has {', '.join(block.model_fields)}"


def _elsewhere(root: type[Block], name: str) -> str | None:
    """A key of that or nearly that name in another block."""
    leaves = {path.rpartition(".")[2]: path for path in reversed(schema.paths(root))}
    nearest = difflib.get_close_matches(name, leaves, n=1, cutoff=0.75)
    return leaves[nearest[0]] if nearest else None
