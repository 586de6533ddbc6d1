"""The Megatron model is the Hugging Face model: log-probs of every supported shape, weights in and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.trainer.backends.megatron.backend import MegatronBackend
from services.trainer.backends.megatron.rules import Shapes, join_qkv, split_qkv
from tests.integration.megatron.support import (
    load_reference,
    make_batch,
    make_config,
    make_model,
    reference_log_probs,
    weights_of,
)

QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA = {
    "family": "gemma3",
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
    "query_pre_attn_scalar": 20,
    "head_dim": 12,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tied, grouped queries": {},
    "untied, one KV head per query head": {"tie_word_embeddings": False, "num_key_value_heads": 6},
    "one KV head, small theta": {
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "head_dim that is not hidden / heads": {"head_dim": 12},
    "attention biases": {"attention_bias": True},
    "MLP biases": {"mlp_bias": True},
    "all biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "Qwen2": {"family": "qwen2"},
    "Qwen3": {"family": "qwen3", "head_dim": 16},
    "Qwen3-MoE": {"family": "qwen3_moe", "head_dim": 16, **QWEN_EXPERTS},
    "Qwen3-MoE renormalised": {"family": "qwen3_moe", **QWEN_EXPERTS, "norm_topk_prob": True},
    "Qwen3-MoE with a dense layer": {"family": "qwen3_moe", **QWEN_EXPERTS, "mlp_only_layers": [1]},
    "Mixtral": {"family": "mixtral", "head_dim": 12, "num_local_experts": 4, "tie_word_embeddings": False},
    "Gemma-3": GEMMA,
    "Gemma-3 with a window that nothing exceeds": {**GEMMA, "sliding_window": 64},
    "Qwen3 untied with biases": {"family": "qwen3", "attention_bias": True, "tie_word_embeddings": False},
}


def largest_error(folder: Path, lengths: tuple[int, list[int]], changes: dict[str, Any] | None = None) -> float:
    batch = make_batch([lengths])
    ours = MegatronBackend(make_config(folder, changes), folder).log_probs(batch)
    temperature = (changes or {}).get("policy.generation.temperature", 1.0)
    with torch.no_grad():
        theirs = reference_log_probs(load_reference(folder), batch, temperature)
    assert theirs.std() > 1
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("shape", SHAPES)
def test_log_probs_equal_hugging_face(shape: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, **SHAPES[shape])
    assert largest_error(folder, (5, [9, 4])) <= 1e-4


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 8.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
@pytest.mark.parametrize("shape", ["tied, grouped queries", "Qwen2", "Qwen3", "Qwen3-MoE", "Mixtral", "Gemma-3"])
def test_rope_scaling_beyond_the_original_length(shape: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    """W-15"""
    parameters: dict[str, Any] = {"rope_theta": 10000.0, **scaling}
    if shape == "Gemma-3":  # of which only layers with full attention are scaled
        local = {"rope_type": "default", "rope_theta": 500.0}
        parameters = {"full_attention": parameters, "sliding_attention": local}
    folder = make_model(tmp_path, **SHAPES[shape], rope_parameters=parameters, max_position_embeddings=512)
    long = {"policy.max_total_sequence_length": 512}
    assert largest_error(folder, (200, [120, 7]), long) <= 1e-4


@pytest.mark.parametrize("temperature", [0.6, 1, 1.7])
def test_logits_are_divided_by_the_temperature(temperature: float, tiny: Path) -> None:
    """P-02, P-03, P-04"""
    assert largest_error(tiny, (5, [9, 4]), {"policy.generation.temperature": temperature}) <= 1e-4


def test_log_softmax_is_taken_in_float32_when_the_model_is_bfloat16(tiny: Path) -> None:
    """P-10: probabilities of all words add up to 1, which they do not after a bfloat16 log-softmax."""
    backend = MegatronBackend(make_config(tiny, {"policy.precision": "bfloat16"}), tiny)
    batch = make_batch([(4, [1] * 307)], holes=False)
    tokens = batch.tokens.clone()
    tokens[batch.starts + 4] = torch.arange(307)
    batch = type(batch)(**{**vars(batch), "tokens": tokens})
    log_probs = backend.log_probs(batch)[batch.loss_mask]
    assert log_probs.dtype == torch.float32
    assert abs(float(log_probs.double().exp().sum()) - 1) < 1e-5


def test_qkv_rows_are_interleaved_by_group() -> None:
    """W-12"""
    shapes = Shapes(heads=4, kv_heads=2, head_dim=2)
    q, k, v = torch.arange(8.0), torch.arange(100.0, 104), torch.arange(200.0, 204)
    parts = [part[:, None].expand(-1, 3).contiguous() for part in (q, k, v)]
    joined = join_qkv(parts, shapes)
    expected = [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    assert joined[:, 0].tolist() == expected
    assert all(torch.equal(a, b) for a, b in zip(split_qkv(joined, shapes), parts, strict=True))


@pytest.mark.parametrize("shape", ["tied, grouped queries", "all biases", "Qwen3", "Qwen3-MoE", "Mixtral", "Gemma-3"])
def test_tensors_are_bit_equal_to_the_folder(shape: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, **SHAPES[shape])
    source = load_file(folder / "model.safetensors")
    published = weights_of(MegatronBackend(make_config(folder), folder))
    assert published.keys() == source.keys()
    assert all(torch.equal(published[name], source[name]) for name in source)


def test_bfloat16_folder_is_read_exactly_and_published_as_asked(tiny: Path, tmp_path: Path) -> None:
    source = {name: tensor.bfloat16() for name, tensor in load_file(tiny / "model.safetensors").items()}
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    save_file(source, tmp_path / "model.safetensors")
    backend = MegatronBackend(make_config(tmp_path, {"policy.generation.vllm_cfg.precision": "bfloat16"}), tmp_path)
    assert {weight.dtype for weight in backend.chunks[0].parameters()} == {torch.float32}
    assert all(torch.equal(tensor, source[name]) for name, tensor in backend.tensors())


def write_folder(source: Path, folder: Path, change: dict[str, Any], drop: str | None = None) -> Path:
    tensors = {**load_file(source / "model.safetensors"), **change}
    tensors.pop(drop, None)
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "drop", "message"),
    [
        ({}, "model.norm.weight", "no tensor model.norm.weight"),
        ({"model.extra.weight": torch.zeros(2)}, None, "does not use: model.extra.weight"),
        ({"model.norm.weight": torch.zeros(47)}, None, r"model.norm.weight has shape \(47,\), not \(48,\)"),
        ({"lm_head.weight": torch.zeros(307, 48)}, None, "lm_head.weight is not the embedding"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: dict[str, Any], drop: str | None, message: str, tiny: Path, tmp_path: Path
) -> None:
    """W-16: nothing stays unwritten in silence."""
    folder = write_folder(tiny, tmp_path, change, drop)
    with pytest.raises(ValueError, match=message):
        MegatronBackend(make_config(folder), folder)


def test_truncated_weights_are_named(tiny: Path, tmp_path: Path) -> None:
    folder = write_folder(tiny, tmp_path, {})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: it has \d+ bytes, not"):
        MegatronBackend(make_config(folder), folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BertModel"]}, "BertModel is not supported; supported are LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights cannot be trained"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='dynamic'"),
    ],
)
def test_unsupported_models_are_refused_by_name(
    change: dict[str, Any], message: str, tiny: Path, tmp_path: Path
) -> None:
    folder = write_folder(tiny, tmp_path, {})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        MegatronBackend(make_config(folder), folder)


def test_a_folder_without_a_model_is_named(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        MegatronBackend(make_config(tiny), tmp_path)
