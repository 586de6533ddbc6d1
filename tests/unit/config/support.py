"""The smallest configuration, and what is said about it when a key is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trireme.config import Config, ConfigError, from_tree
from trireme.config.loader import parse_overrides
from trireme.config.tree import merge

FILES = Path(__file__).parent / "files"
NO_TENSORS = b"\x02" + bytes(7) + b"{}"  # the shortest safetensors file
SMALLEST: dict[str, Any] = {
    "policy": {"model_name": "some/model", "megatron_cfg": {"enabled": True}},
    "data": {"dataset_name": "reasoning_gym/chain_sum"},
}


def make(*overrides: str) -> Config:
    """The smallest configuration with keys changed."""
    return from_tree(merge([SMALLEST, parse_overrides(overrides)]))


def problems(*overrides: str) -> list[str]:
    """What is wrong with the smallest configuration once keys are changed."""
    try:
        make(*overrides)
    except ConfigError as error:
        return error.problems
    return []
