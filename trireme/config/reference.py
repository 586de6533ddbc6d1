"""The reference of all keys, written from the models themselves."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from trireme.config import legacy, rules, schema, unsupported
from trireme.config.base import Block
from trireme.config.root import Config

HEADER = """# Configuration

One YAML file describes a run. Its names follow NeMo-RL v0.3, whose files load here; what they ask for and this project
does not have is refused by name. `trireme config check FILE` checks a file, `trireme config show FILE` prints it with
everything filled in, and `key=value` after either (or after `trireme up FILE`) overrides one key.

- `defaults: parent.yaml` (or a list) inherits from files beside the file; the file's own keys lie on top.
- `${a.b}` is the value of another key, `${mul:${a.b},2}` a product, `${oc.env:NAME}` an environment variable.
- `null` for a key whose default is another key's value means that default.
- `TRIREME_REDIS_URL` takes the place of `redis.url`.

This page is generated from the models in `trireme/config/` by `trireme config reference`.
"""
NAMES = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "null", Any: "any"}
BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}


def render() -> str:
    """The whole page, in Markdown."""
    parts = [HEADER, *_block_sections(Config), _unsupported(), _without_effect(), _renamed(), _rules()]
    return "\n".join(parts)


def _block_sections(model: type[Block], path: str = "") -> Iterator[str]:
    """A section for each block, outer before inner."""
    if path:
        yield _section(model, path)
    for name, field in model.model_fields.items():
        inner, named = schema.block_of(field.annotation), schema.named_blocks_of(field.annotation)
        below = f"{path}.{name}" if path else name
        if inner:
            yield from _block_sections(inner, below)
        if named:
            yield from _block_sections(named, f"{below}.<name>")


def _section(model: type[Block], path: str) -> str:
    rows = [
        f"| `{name}` | {_type(field)} | {_default(field)} | {_cell(field.description or '')} |"
        for name, field in model.model_fields.items()
        if not schema.inner_blocks(field.annotation)
    ]
    head = f"## {path}\n\n{(model.__doc__ or '').strip()}\n"
    table = ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows] if rows else []
    return "\n".join([head, *table, ""] if table else [head])


def _type(field: FieldInfo) -> str:
    bounds = [
        text.format(getattr(limit, kind))
        for limit in field.metadata
        for kind, text in BOUNDS.items()
        if getattr(limit, kind, None) is not None
    ]
    return _cell(" ".join([_name(field.annotation), *bounds]))


def _name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_name, arguments))
    if origin is list:
        return f"list of {_name(arguments[0])}"
    return "block of keys" if origin is dict else NAMES[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)  # type: ignore[call-arg]
    written = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    return _cell(f"`{value if isinstance(value, str) else written}`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _unsupported() -> str:
    lines = [f"- `{row.key}`: use {row.instead}" for row in unsupported.TABLE]
    return "\n".join(
        ["## Not yet supported\n", "These keys load, and these values of them are refused by name.\n", *lines, ""]
    )


def _without_effect() -> str:
    lines = [f"- `{key}`: {row.why}" for key, row in legacy.WITHOUT_EFFECT.items()]
    foreign = [f"- `{key}`: {row.why}" for key, row in legacy.FOREIGN.items()]
    note = "A value that asks for something that is not here is refused by name instead.\n"
    return "\n".join(["## Keys of NeMo-RL that are ignored, with a warning\n", note, *lines, *foreign, ""])


def _renamed() -> str:
    lines = [f"- `{old}` is `{new}`" for old, new in legacy.RENAMED.items()]
    return "\n".join(["## Renamed keys\n", *lines, ""])


def _rules() -> str:
    lines = [f"- `{rule.name}`: {rule.summary}" for rule in rules.RULES]
    return "\n".join(
        ["## Rules across keys\n", "Checked together when a file is loaded; a message names the rule.\n", *lines, ""]
    )
