"""The exported folder: complete, read by transformers, equal to what was trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from services.trainer.backends.megatron import export
from services.trainer.backends.megatron.backend import MegatronBackend
from tests.integration.megatron.support import (
    load_reference,
    make_config,
    make_model,
    policy_gradient,
    ragged_batch,
    reference_log_probs,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = make_model(tmp_path / "source", tie_word_embeddings=False)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    return folder


def test_transformers_loads_it_with_equal_logits(source: Path, tmp_path: Path) -> None:
    backend, batch = MegatronBackend(make_config(source), source), ragged_batch()
    backend.step(batch, policy_gradient)
    target = tmp_path / "out"
    export.export(backend.tensors(), source, target, torch.float32)
    with torch.no_grad():
        theirs = reference_log_probs(load_reference(target), batch)
    assert float((backend.log_probs(batch) - theirs).abs().max()) <= 1e-4
    assert sorted(path.name for path in target.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_an_untrained_model_round_trips_bit_equal(source: Path, tmp_path: Path) -> None:
    backend = MegatronBackend(make_config(source), source)
    export.export(backend.tensors(), source, tmp_path / "out", torch.float32)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_configuration_says_the_dtype(source: Path, tmp_path: Path) -> None:
    backend = MegatronBackend(make_config(source), source)
    export.export(backend.tensors(), source, tmp_path / "out", torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_large_weights_are_sharded(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "SHARD_BYTES", 60_000)
    backend, batch = MegatronBackend(make_config(source), source), ragged_batch()
    export.export(backend.tensors(), source, tmp_path / "out", torch.float32)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    with torch.no_grad():
        theirs = reference_log_probs(load_reference(tmp_path / "out"), batch)
    assert float((backend.log_probs(batch) - theirs).abs().max()) <= 1e-4
    again = MegatronBackend(make_config(tmp_path / "out"), tmp_path / "out")
    assert torch.equal(again.log_probs(batch), backend.log_probs(batch))


def interrupted(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    yield next(tensors)
    raise OSError("no space left on device")


def test_an_interrupted_export_leaves_the_old_one(source: Path, tmp_path: Path) -> None:
    backend, target = MegatronBackend(make_config(source), source), tmp_path / "out"
    export.export(backend.tensors(), source, target, torch.float32)
    before = (target / "model.safetensors").read_bytes()
    with pytest.raises(OSError, match="no space"):
        export.export(interrupted(backend.tensors()), source, target, torch.bfloat16)
    assert (target / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_second_export_replaces_the_first(source: Path, tmp_path: Path) -> None:
    backend, target = MegatronBackend(make_config(source), source), tmp_path / "out"
    for dtype in (torch.float32, torch.bfloat16):
        export.export(backend.tensors(), source, target, dtype)
    assert {tensor.dtype for tensor in load_file(target / "model.safetensors").values()} == {torch.bfloat16}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_the_source_is_never_overwritten(source: Path) -> None:
    backend = MegatronBackend(make_config(source), source)
    with pytest.raises(ValueError, match="the folder that the model came from"):
        export.export(backend.tensors(), source, source, torch.float32)
