"""Prompts that cannot be used are refused before anything starts; the trainer reads them, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result


@pytest.mark.parametrize("words", [("up",), ("config", "check", "--data")])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"prompt": "1+1", "answer": "2"}\n{"prompt": "2+2"\n', "row 2: is not JSON"),
        ('{"prompt": "1+1", "answer": "2"}\n\n{"prompt": "", "answer": "4"}\n', 'row 3: "prompt" should be text'),
        ("", "is empty"),
    ],
)
def test_a_bad_row_is_named(
    trireme: Callable[..., Result],
    config_file: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    content: str,
    complaint: str,
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    result = trireme(*words, config_file, f"data.dataset_name={file}")
    output = " ".join(result.output.split())
    assert result.exit_code == 2
    assert "prompts.jsonl" in output and complaint in output and "Traceback" not in output
    assert not (tmp_path / "run").exists()
