"""What `config check` says of a model's safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.unit.config.support import NO_TENSORS
from trireme.config.model_weights import INDEX, WeightsError, find_tensors

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Tensors a and b in the first file, c in the second."""
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.float16)}, tmp_path / FIRST, {"format": "pt"})
    save_file({"c": np.ones((), np.float32)}, tmp_path / SECOND)
    write_index(tmp_path, {"a": FIRST, "b": FIRST, "c": SECOND})
    return tmp_path


def write_index(folder: Path, names: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def refusal(folder: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        find_tensors(folder)
    return str(caught.value)


def test_every_tensor_is_found_with_and_without_an_index(sharded: Path) -> None:
    expected = {"a": FIRST, "b": FIRST, "c": SECOND}
    assert find_tensors(sharded) == expected
    (sharded / INDEX).unlink()
    assert find_tensors(sharded) == expected


def test_of_several_files_one_is_the_whole_model(sharded: Path) -> None:
    """As `transformers` takes it."""
    (sharded / INDEX).unlink()
    save_file({"a": np.zeros(1)}, sharded / "model.safetensors")
    assert find_tensors(sharded) == {"a": "model.safetensors"}


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -1])
def test_a_file_that_was_cut_short_is_named(sharded: Path, kept: int) -> None:
    """A download that broke off."""
    file = sharded / SECOND
    file.write_bytes(file.read_bytes()[:kept])
    assert str(file) in refusal(sharded)


def test_a_file_with_more_than_its_header_counts_is_named(sharded: Path) -> None:
    with (sharded / SECOND).open("ab") as file:
        file.write(b"more")
    assert "is damaged: it has" in refusal(sharded)


@pytest.mark.parametrize(
    "header", [b"{", b"[]", b'{"a": 1}', b'{"a": {}}', b'{"a": {"data_offsets": "x"}}', b"\xff\xff"]
)
def test_a_header_that_says_something_else_is_named(sharded: Path, header: bytes) -> None:
    (sharded / SECOND).write_bytes(len(header).to_bytes(8, "little") + header)
    assert f"{sharded / SECOND} is cut short, or no safetensors file" in refusal(sharded)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    assert f"{sharded / SECOND} cannot be read: No such file" in refusal(sharded)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}'])
def test_a_damaged_index_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert f"{sharded / INDEX} is damaged" in refusal(sharded)


def test_an_index_that_names_another_file_is_named(sharded: Path) -> None:
    write_index(sharded, {"a": FIRST, "b": SECOND, "c": SECOND})
    assert f"{SECOND} has no tensor b" in refusal(sharded)


def test_a_tensor_in_two_files_is_named(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    save_file({"c": np.ones(1)}, sharded / "other.safetensors")
    assert f"tensor c is in {SECOND} and in other.safetensors" in refusal(sharded)


def test_a_folder_without_safetensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    assert refusal(tmp_path) == f"{tmp_path} holds no .safetensors file"
    (tmp_path / "model.safetensors").write_bytes(NO_TENSORS)
    assert find_tensors(tmp_path) == {}
