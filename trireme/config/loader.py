"""From a YAML file and `key=value` overrides to a checked Config."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from trireme.config import legacy, tree
from trireme.config.errors import ConfigError
from trireme.config.messages import problems_of
from trireme.config.root import Config

REDIS_URL_VARIABLE = "TRIREME_REDIS_URL"
log = logging.getLogger("trireme.config")


@dataclass(frozen=True)
class Loaded:
    """A configuration, and what its reader should know about names in the files: renamed keys, ignored keys."""

    config: Config
    notices: tuple[str, ...]


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Read a file with its parents, lay the overrides over it, resolve and check everything.

    TRIREME_REDIS_URL takes the place of redis.url in the files; an override takes the place of both. Renamed and
    ignored keys are reported once, as warnings of the logger `trireme.config`. Raises ConfigError.
    """
    loaded = load(path, overrides)
    for notice in loaded.notices:
        log.warning(notice)
    return loaded.config


def load(path: Path | str, overrides: Sequence[str] = ()) -> Loaded:
    """As `load_config`, with the notices returned in place of logged."""
    trees = [*read_files(Path(path)), *_from_environment(), parse_overrides(overrides)]
    try:
        notices = [notice for t in trees for notice in legacy.rename(t)]
        merged = tree.merge(trees)
        notices += legacy.drop_foreign(merged)
    except ConfigError as error:
        raise ConfigError(error.problems, str(path)) from error
    return Loaded(from_tree(merged, str(path)), tuple(dict.fromkeys(notices + legacy.without_effect(merged))))


def from_tree(user: dict[str, Any], source: str | None = None) -> Config:
    """A checked Config from a tree of keys as a file has them. Raises ConfigError."""
    try:
        return Config.model_validate(user)
    except ValidationError as error:
        raise ConfigError(problems_of(Config, error), source) from error


def read_files(path: Path, seen: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """The trees of a file and of all its parents, the file's own last. Raises ConfigError."""
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"`defaults` go round in a circle: {' -> '.join(map(str, (*seen, path)))}")
    own = _read(path, seen)
    parents = own.pop("defaults", None) or []
    trees = [t for parent in _parents(parents, path) for t in read_files(parent, (*seen, path))]
    return [*trees, own]


def _parents(value: Any, path: Path) -> list[Path]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"`defaults` is a file name or a list of file names, not {value!r}", str(path))
    return [path.parent / name for name in names if name != "_self_"]


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if not path.is_file():
        by = f", named in `defaults` of {seen[-1]}" if seen else ""
        raise ConfigError(f"no such configuration file: {path}{by}")
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"not readable as YAML: {error}", str(path)) from error
    if not isinstance(loaded, dict):
        raise ConfigError("a configuration file is a block of keys, not a list or a single value", str(path))
    return {str(key): value for key, value in loaded.items()}


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The tree of `a.b=c` overrides; `+a.b=c` and `++a.b=c` mean the same. Raises ConfigError."""
    try:
        parsed = OmegaConf.from_dotlist([_override(item) for item in overrides])
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"not readable as overrides: {error}") from error
    return tree.merge([OmegaConf.to_container(parsed, resolve=False)])  # type: ignore[list-item]


def _override(item: str) -> str:
    key, equals, _ = item.lstrip("+").partition("=")
    if not equals or not key or key.startswith("~"):
        raise ConfigError(f"an override is key=value, such as grpo.seed=1, not {item!r}")
    return item.lstrip("+")


def _from_environment() -> list[dict[str, Any]]:
    url = os.environ.get(REDIS_URL_VARIABLE)
    return [{"redis": {"url": tree.escaped(url)}}] if url else []
