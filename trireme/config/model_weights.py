"""Whether the safetensors files of a model folder are there and whole: their headers are read, not the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PREFIX = 8  # bytes in front of a header, which say how long it is
LONGEST_HEADER = 100_000_000  # bytes: the format's own limit


class WeightsError(ValueError):
    """A file that is missing or damaged; the message names it."""


def find_tensors(folder: Path) -> dict[str, str]:
    """The file of each tensor. Raises WeightsError naming a file that is missing, cut short or no safetensors."""
    if (folder / INDEX).is_file():
        return _indexed(folder)
    files = [SINGLE] if (folder / SINGLE).is_file() else sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder} holds no .safetensors file")
    found: dict[str, str] = {}
    for file in files:
        for name in _names(folder / file):
            if name in found:
                raise WeightsError(f"{folder}: tensor {name} is in {found[name]} and in {file}")
            found[name] = file
    return found


def _indexed(folder: Path) -> dict[str, str]:
    named = _read_index(folder / INDEX)
    names = {file: set(_names(folder / file)) for file in sorted(set(named.values()))}
    for name, file in named.items():
        if name not in names[file]:
            raise WeightsError(f"{folder / INDEX}: {file} has no tensor {name}")
    return named


def _read_index(index: Path) -> dict[str, str]:
    try:
        named = json.loads(index.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in named.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is damaged: no object with a weight_map ({error!r})") from error


def _names(path: Path) -> list[str]:
    """Of the tensors in a file whose length is what its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(PREFIX), "little")
            header: dict[str, Any] = json.loads(file.read(min(length, LONGEST_HEADER)))
        header.pop("__metadata__", None)
        end = PREFIX + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is cut short, or no safetensors file: {error!r}") from error
    if end != size:
        raise WeightsError(f"{path} is damaged: it has {size} bytes, not the {end} that its header counts")
    return list(header)
