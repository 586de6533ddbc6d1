"""Plain trees of keys on their way to the models: merging, defaults, references, and the way back to a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trireme.config import hardware, resolvers, schema
from trireme.config.base import Block
from trireme.config.errors import ConfigError
from trireme.config.names import check_names

PRECISION_KEYS = ("policy.precision", "policy.generation.vllm_cfg.precision", "policy.megatron_cfg.pipeline_dtype")
MASK = "***"


def merge(trees: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Trees laid over one another, the last on top; references stay as they are."""
    merged = OmegaConf.merge(*(OmegaConf.create(t) for t in trees))
    plain = OmegaConf.to_container(merged, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def complete(model: type[Block], user: dict[str, Any]) -> dict[str, Any]:
    """The user's tree with defaults filled in and references resolved.

    Raises ConfigError for keys that no model knows and for references that lead nowhere.
    """
    check_names(model, user)
    resolvers.register()
    tree = OmegaConf.merge(OmegaConf.create(schema.defaults(model)), OmegaConf.create(without_nulls(model, user)))
    assert isinstance(tree, DictConfig)
    try:
        _settle_precision(tree)
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error)) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


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
    for key in PRECISION_KEYS:
        if OmegaConf.select(tree, key) == "auto":
            OmegaConf.update(tree, key, hardware.native_precision())


def _explain(error: OmegaConfBaseException) -> str:
    key = error.full_key or "the configuration"
    return f"{key}: {str(error).splitlines()[0]}"


def escaped(value: Any) -> Any:
    """The same tree with `${` in texts written so that it is read back as text, not as a reference."""
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    return value


def masked(plain: dict[str, Any]) -> dict[str, Any]:
    """The same tree without secrets: the password in redis.url and the tokens in security.tokens."""
    hidden = {**plain, "redis": dict(plain["redis"]), "security": dict(plain["security"])}
    hidden["redis"]["url"] = mask_url(plain["redis"]["url"])
    hidden["security"]["tokens"] = [MASK for _ in plain["security"]["tokens"]]
    return hidden


def mask_url(url: str | None) -> str | None:
    """The URL with its password replaced by asterisks."""
    parts = urlsplit(url or "")
    if parts.password is None:
        return url
    user, host = parts.username or "", parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}:{MASK}@{host}"))
