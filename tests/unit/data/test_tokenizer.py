"""Loading a tokenizer, with the chat template that the configuration asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.trainer.data import load_tokenizer
from services.trainer.data.base import DataError
from tests.unit.data.support import TEMPLATE, tokenizer

OTHER = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer().save_pretrained(str(tmp_path / "model"))
    return tmp_path / "model"


def test_chat_templates(folder: Path, tmp_path: Path) -> None:
    """null and "default" keep the tokenizer's own, a .jinja file and a text in full replace it."""
    (tmp_path / "other.jinja").write_text(OTHER)
    wanted = {None: TEMPLATE, "default": TEMPLATE, OTHER: OTHER, str(tmp_path / "other.jinja"): OTHER}
    for setting, template in wanted.items():
        loaded = load_tokenizer(SimpleNamespace(name=str(folder), chat_template=setting))
        assert loaded.chat_template == template


def test_what_cannot_be_loaded_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"policy\.tokenizer\.name.*no/such/model"):
        load_tokenizer(SimpleNamespace(name=str(tmp_path / "no/such/model"), chat_template=None))
    with pytest.raises(DataError, match=r"policy\.tokenizer\.chat_template.*missing\.jinja"):
        load_tokenizer(SimpleNamespace(name=str(folder), chat_template="missing.jinja"))


def test_importing_the_data_part_is_cheap() -> None:
    code = "import sys, services.trainer.data; assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3], timeout=60)
