"""Checks the folder of `policy.model_name` before anything starts: a wrong one would be noticed a minute later."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json")


class ModelFolderError(Exception):
    """policy.model_name cannot be used; the message says why and what would do."""


def check_model(name: str) -> None:
    """Raises ModelFolderError. A name that looks like one on the Hugging Face Hub is left to Transformers."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_folder(folder)
    elif folder.exists():
        raise ModelFolderError(f"policy.model_name: {folder} is a file; it must be a folder in Hugging Face's layout")
    elif _is_path(name):
        raise ModelFolderError(
            f"policy.model_name: the folder {folder} does not exist. "
            f"For the demonstration model: trireme model smollm2 {folder}"
        )


def _is_path(name: str) -> bool:
    """`models/x` could be an organisation's name on the Hub, but a folder `models` is what people mean by it."""
    parent = Path(name).parts[0]
    return not HUB_NAME.match(name) or parent == "models" or ("/" in name and Path(parent).is_dir())


def _check_folder(folder: Path) -> None:
    config = folder / "config.json"
    try:
        architectures = json.loads(config.read_text()).get("architectures")
    except FileNotFoundError:
        raise ModelFolderError(f"policy.model_name: {folder} has no config.json") from None
    except (ValueError, AttributeError) as error:
        raise ModelFolderError(f"policy.model_name: {config} is not a JSON object: {error}") from None
    if not architectures:
        raise ModelFolderError(f"policy.model_name: {config} names no architecture (key `architectures`)")
    _require_any(folder, WEIGHTS, "weights")
    _require_any(folder, TOKENIZER, "tokenizer")


def _require_any(folder: Path, patterns: Sequence[str], what: str) -> None:
    if not any(path for pattern in patterns for path in folder.glob(pattern)):
        raise ModelFolderError(f"policy.model_name: {folder} has no {what} ({', '.join(patterns)})")
