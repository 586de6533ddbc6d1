"""The user's own values checked one by one, before references spread a wrong one to the keys that follow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from trireme.config import schema
from trireme.config.base import Block
from trireme.config.errors import ConfigError
from trireme.config.messages import problems_of
from trireme.config.names import visit

# What a key may say in a file beside the values of its type: it is replaced when the configuration is loaded.
SETTLED_LATER = {
    "policy.precision": "auto",
    "policy.generation.vllm_cfg.precision": "auto",
    "policy.megatron_cfg.pipeline_dtype": "auto",
}


def check_values(model: type[Block], user: dict[str, Any]) -> None:
    """Raise ConfigError that names every missing key and every wrong value; references are left for later."""
    problems = list(_missing(model, user)) + [
        problem
        for path, value, field in visit(model, user)
        if field is not None and not _skipped(path, value, field)
        for problem in _check(model, path, value, field)
    ]
    if problems:
        raise ConfigError(problems)


def _missing(model: type[Block], user: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """A sentence for each key that has no default and no value."""
    for name, field in model.model_fields.items():
        inner, value = schema.block_of(field.annotation), user.get(name)
        if inner and not (value is None and schema.nullable(field.annotation)):
            yield from _missing(inner, value or {}, f"{prefix}{name}.")
        elif field.is_required() and name not in user:
            yield f"{prefix}{name} is required: {field.description}"


def _skipped(path: str, value: Any, field: FieldInfo) -> bool:
    later = value == "???" or value == SETTLED_LATER.get(path, object)
    return later or schema.inner_blocks(field.annotation) is not None or _has_reference(value)


def _has_reference(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_reference, value.values()))
    return any(map(_has_reference, value)) if isinstance(value, list) else isinstance(value, str) and "${" in value


def _check(model: type[Block], path: str, value: Any, field: FieldInfo) -> list[str]:
    adapter: TypeAdapter[Any] = TypeAdapter(
        Annotated[field.annotation, field],  # type: ignore[arg-type]
        config=ConfigDict(strict=True, allow_inf_nan=False),
    )
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        return problems_of(model, error, prefix=path)
    return []
