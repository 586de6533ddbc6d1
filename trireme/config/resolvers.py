"""The interpolations beside `${a.b}`: `${mul:a,b}` for users, and two that only defaults use."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf


def _number(value: Any, root: Any) -> int | float:
    """The operand itself, or the value of the key that it names."""
    if isinstance(value, str):
        value = OmegaConf.select(root, value, default=value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"mul needs two numbers or keys that hold numbers, not {value!r}")
    return value


def _mul(a: Any, b: Any, *, _root_: Any) -> int | float:
    return _number(a, _root_) * _number(b, _root_)


def _is(value: Any, other: Any) -> bool:
    return str(value) == str(other)


def _age_limit(enabled: Any, steps: Any) -> Any:
    return steps if enabled else 0


def register() -> None:
    """Make the interpolations known to OmegaConf; calling it again does no harm."""
    OmegaConf.register_resolver("mul", _mul, replace=True)
    OmegaConf.register_resolver("is", _is, replace=True)
    OmegaConf.register_resolver("age_limit", _age_limit, replace=True)
