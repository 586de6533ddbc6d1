"""Prompts from a Hugging Face dataset: a name on the hub, or a local folder (works offline)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.trainer.data.base import DataError, Item
from services.trainer.data.rows import RowReader


def read_huggingface(name: str, subset: str | None, split: str, reader: RowReader) -> list[Item]:
    """All rows of one split. Raises DataError naming dataset, split or row."""
    items = [reader.item(row, index, index + 1) for index, row in enumerate(_load(name, subset, split))]
    if not items:
        raise DataError(f'data.dataset_name: split "{split}" of "{name}" is empty')
    return items


def _load(name: str, subset: str | None, split: str) -> Any:
    import datasets

    where = "folder" if Path(name).exists() else "Hugging Face dataset"
    try:
        if (Path(name) / "dataset_dict.json").exists() or (Path(name) / "state.json").exists():
            return _split_of(datasets.load_from_disk(name), name, split)
        return datasets.load_dataset(name, subset, split=split)
    except DataError:
        raise
    except Exception as error:  # the library and the network below it raise dozens of types
        hint = "" if where == "folder" else "; without network access give a local folder or a .jsonl file"
        raise DataError(
            f'data.dataset_name: {where} "{name}", split "{split}", cannot be loaded '
            f"({type(error).__name__}: {error}){hint}"
        ) from error


def _split_of(saved: Any, name: str, split: str) -> Any:
    """A saved dataset is either one table or a dictionary of splits."""
    if not hasattr(saved, "keys"):
        return saved
    if split not in saved:
        raise DataError(f'data.dataset_name: "{name}" has no split "{split}"; it has: {", ".join(saved.keys())}')
    return saved[split]
