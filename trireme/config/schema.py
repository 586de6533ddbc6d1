"""Reading the models: which keys exist, under which block, with which default."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from trireme.config.base import Block


@dataclass(frozen=True)
class Key:
    """One leaf of the schema: its dotted path (`*` for a name that the user chooses), and its field."""

    path: str
    field: FieldInfo


def block_of(annotation: Any) -> type[Block] | None:
    """The block that a key holds (also when it may be null), or None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return next((b for b in map(block_of, get_args(annotation)) if b), None)
    return None


def named_blocks_of(annotation: Any) -> type[Block] | None:
    """The block under every name of a key such as `env`, whose names are the user's; None for any other key."""
    return block_of(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def inner_blocks(annotation: Any) -> type[Block] | None:
    """The block below a key, be it one or one under each name."""
    return block_of(annotation) or named_blocks_of(annotation)


def nullable(annotation: Any) -> bool:
    """Whether null is a value of its own for a key of this type."""
    return annotation is None or type(None) in get_args(annotation)


def refers(field: FieldInfo) -> bool:
    """Whether the key's default is the value of another key."""
    return isinstance(field.default, str) and "${" in field.default


def defaults(model: type[Block]) -> dict[str, Any]:
    """All defaults of a block as a tree, references unresolved; required keys are absent."""
    tree: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        inner = block_of(field.annotation)
        if inner is not None and not nullable(field.annotation):
            tree[name] = defaults(inner)
        elif not field.is_required():
            tree[name] = field.get_default(call_default_factory=True)  # type: ignore[call-arg]
    return tree


def walk(model: type[Block], prefix: str = "") -> Iterator[Key]:
    """Every leaf below a block, in the order of the models."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = block_of(field.annotation)
        named = named_blocks_of(field.annotation)
        if inner:
            yield from walk(inner, f"{path}.")
        elif named:
            yield from walk(named, f"{path}.*.")
        else:
            yield Key(path, field)


@cache
def paths(model: type[Block]) -> tuple[str, ...]:
    """The dotted paths of all leaves below a block."""
    return tuple(key.path for key in walk(model))


def find(model: type[Block], path: str) -> FieldInfo:
    """The field at a dotted path; a name under a key such as `env` may be any. Raises KeyError."""
    name, _, rest = path.partition(".")
    field = model.model_fields[name]
    named = named_blocks_of(field.annotation)
    inner = named or block_of(field.annotation)
    if named:
        rest = rest.partition(".")[2]
    return find(inner, rest) if inner and rest else field


def block_at(model: type[Block], path: str) -> type[Block] | None:
    """The block at a dotted path (the empty path is the model itself), or None where there is none."""
    if not path:
        return model
    try:
        annotation = find(model, path).annotation
    except KeyError:
        return None
    return inner_blocks(annotation)
