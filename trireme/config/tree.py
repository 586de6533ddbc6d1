"""Plain trees of keys on their way to the models: merging, defaults, references, and the way back to a file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trireme.config import hardware, resolvers, schema
from trireme.config.base import Block
from trireme.config.errors import ConfigError
from trireme.config.names import check_names, suggest, visit
from trireme.config.values import SETTLED_LATER, check_values


def merge(trees: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Trees laid over one another, the last on top; references stay as they are."""
    given = [t for t in trees if t] or [{}]
    if len(given) == 1:  # OmegaConf is slow, and there is nothing to merge
        return given[0]
    for below, above in itertools.combinations(given, 2):
        _check_shapes(below, above)
    merged = OmegaConf.merge(*map(OmegaConf.create, given))
    plain = OmegaConf.to_container(merged, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _check_shapes(below: dict[str, Any], above: dict[str, Any], prefix: str = "") -> None:
    """Raises ConfigError naming a block that is overridden by something that is none."""
    for key in below.keys() & above.keys():
        value, name = above[key], f"{prefix}{key}"
        if isinstance(below[key], dict) and isinstance(value, dict):
            _check_shapes(below[key], value, f"{name}.")
        elif isinstance(below[key], dict) and isinstance(value, list):
            raise ConfigError(f"{name} is a block of keys and cannot be a list; give its keys: {name}.KEY=VALUE")


def complete(model: type[Block], user: dict[str, Any]) -> dict[str, Any]:
    """The user's tree with defaults filled in and references resolved.

    Raises ConfigError for keys that no model knows, wrong values, and references that lead nowhere.
    """
    check_names(model, user)
    given = without_nulls(model, user)
    check_values(model, given)
    resolvers.register()
    tree = OmegaConf.merge(_defaults(model), OmegaConf.create(given))
    assert isinstance(tree, DictConfig)
    try:
        _settle_precision(tree)
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(model, given, error)) from error
    assert isinstance(plain, dict)
    _settle_prompt_length(plain)
    return {str(key): value for key, value in plain.items()}


@cache
def _defaults(model: type[Block]) -> DictConfig:
    """The defaults as OmegaConf holds them; merging copies them, so that one will do."""
    return OmegaConf.create(schema.defaults(model))


def without_nulls(model: type[Block], user: dict[str, Any]) -> dict[str, Any]:
    """Drop a null where null is no value: an empty block, or a key that otherwise follows another key."""
    kept: dict[str, Any] = {}
    for name, value in user.items():
        field = model.model_fields[name]
        inner = schema.block_of(field.annotation)
        if value is None and not schema.nullable(field.annotation) and (inner or schema.refers(field)):
            continue
        kept[name] = without_nulls(inner, value) if inner and isinstance(value, dict) else value
    return kept


def _settle_precision(tree: DictConfig) -> None:
    """Replace `auto` by what this machine multiplies natively, before anything refers to it."""
    for key, placeholder in SETTLED_LATER.items():
        if OmegaConf.select(tree, key) == placeholder:
            OmegaConf.update(tree, key, hardware.native_precision())


def _settle_prompt_length(plain: dict[Any, Any]) -> None:
    """Where a prompt may be as long as the whole context, as in NeMo-RL's files, leave room for the response.

    Room is policy.generation.max_new_tokens, or one token where that is the whole context too.
    """
    generation = plain["policy"]["generation"]
    context, response = generation["vllm_cfg"]["max_model_len"], generation["max_new_tokens"]
    if plain["data"]["max_input_seq_length"] == context and isinstance(context, int) and isinstance(response, int):
        plain["data"]["max_input_seq_length"] = context - (response if response < context else 1)


def _explain(model: type[Block], given: dict[str, Any], error: OmegaConfBaseException) -> str:
    """OmegaConf's first line, with the key that it happened at and the key that was probably meant."""
    message = str(error).splitlines()[0]
    missing = re.search(r"Interpolation key '(.+?)' not found", message)
    if not missing:
        return f"{error.full_key or 'the configuration'}: {message}"
    said_in = (path for path, value, _ in visit(model, given) if isinstance(value, str) and missing[1] in value)
    return f"{next(said_in, error.full_key)}: {message}; {suggest(model, missing[1])}"


def escaped(value: Any) -> Any:
    """The same tree with `${` in texts written so that it is read back as text, not as a reference."""
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    return value
