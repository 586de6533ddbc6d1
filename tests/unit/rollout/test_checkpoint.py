"""What a model folder demands of a version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.rollout.checkpoint import Checkpoint, read
from trireme.weights.manifest import WeightsError, build

Named = dict[str, Tensor]


def folder(path: Path, tensors: Named, **config: object) -> Checkpoint:
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return read(path)


@pytest.fixture
def tensors() -> Named:
    return {"model.embed_tokens.weight": torch.ones(4, 2), "model.norm.weight": torch.ones(2)}


def test_exactly_the_folders_tensors_pass(tmp_path: Path, tensors: Named) -> None:
    folder(tmp_path, tensors).check(build(1, "r", tensors.items()))


def test_missing_and_unexpected_names_are_told(tmp_path: Path, tensors: Named) -> None:
    known = folder(tmp_path, tensors)
    sent = {"model.embed_tokens.weight": torch.ones(4, 2), "model.nrom.weight": torch.ones(2)}
    with pytest.raises(WeightsError, match=r"version 3 .* missing model.norm.weight, unexpected model.nrom.weight"):
        known.check(build(3, "r", sent.items()))


def test_a_wrong_shape_is_told(tmp_path: Path, tensors: Named) -> None:
    sent = {**tensors, "model.norm.weight": torch.ones(3)}
    with pytest.raises(WeightsError, match=r"'model.norm.weight' of version 1 has shape \[3\], the model's has \[2\]"):
        folder(tmp_path, tensors).check(build(1, "r", sent.items()))


def test_a_tied_head_may_be_sent_again_or_left_out_but_not_differ(tmp_path: Path, tensors: Named) -> None:
    """W-09: a copy that fell out of sync is refused."""
    head = {"lm_head.weight": torch.ones(4, 2)}
    known = folder(tmp_path, {**tensors, **head}, tie_word_embeddings=True)
    known.check(build(1, "r", tensors.items()))
    known.check(build(1, "r", {**tensors, **head}.items()))
    with pytest.raises(WeightsError, match="lm_head.weight differs from model.embed_tokens.weight"):
        known.check(build(1, "r", {**tensors, "lm_head.weight": torch.zeros(4, 2)}.items()))


def test_an_untied_head_is_demanded(tmp_path: Path, tensors: Named) -> None:
    known = folder(tmp_path, {**tensors, "lm_head.weight": torch.ones(4, 2)})
    with pytest.raises(WeightsError, match="missing lm_head.weight"):
        known.check(build(1, "r", tensors.items()))


def test_buffers_of_old_checkpoints_are_not_demanded(tmp_path: Path, tensors: Named) -> None:
    known = folder(tmp_path, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    known.check(build(1, "r", tensors.items()))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, None, {2}), (2, [2, 7], {2, 7}), ([3, 4], 5, {3, 4, 5}), (None, None, set())],
)
def test_every_end_token_is_known(
    tmp_path: Path, tensors: Named, config: object, generation: object, expected: set[int]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert folder(tmp_path, tensors, eos_token_id=config).eos_token_ids == expected


def test_a_folder_without_safetensors_demands_no_names(tmp_path: Path, tensors: Named) -> None:
    (tmp_path / "config.json").write_text("{}")
    read(tmp_path).check(build(1, "r", tensors.items()))
