"""Prompts from a JSON Lines file: one object a row, checked whole before training starts."""

from __future__ import annotations

import json
from pathlib import Path

from services.trainer.data.base import DataError, Item
from services.trainer.data.rows import RIGHT, RowReader


def read_jsonl(path: Path, reader: RowReader) -> list[Item]:
    """All rows of a file; blank lines are skipped. Raises DataError naming file, row number and problem."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    rows = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    items = [reader.item(_parse(path, number, line), index, number) for index, (number, line) in enumerate(rows)]
    if not items:
        raise DataError(f"{path}: is empty; {RIGHT}")
    return items


def _parse(path: Path, number: int, line: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, row {number}: is not JSON ({error}); {RIGHT}") from error
