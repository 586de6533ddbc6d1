"""The Hugging Face architectures that are supported, and what Megatron must know about each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.config.model_features import GELU_TANH, SILU, unsupported


@dataclass(frozen=True)
class Biases:
    """Which linear layers of an architecture have a bias."""

    qkv: bool = False
    projection: bool = False
    mlp: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture of `count` experts of `width`, of which each token has `chosen`; layers: 1 for a mixture, 0 for a dense
    layer. renormalise: the weights of the chosen add up to 1."""

    count: int
    chosen: int
    width: int
    renormalise: bool
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """Attention to the last `size` tokens only, itself included, in the layers that have a 1 here."""

    size: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Architecture:
    """A supported Hugging Face model: its configuration object and what Megatron needs beside it.

    centred_norms: norms multiply by 1 + weight. post_norms: attention and MLP are normalised once more before they are
    added to the residual. softmax_scale: None for 1 / sqrt(head_dim).
    """

    name: str
    hf: Any
    biases: Biases
    qk_norm: bool = False
    experts: Experts | None = None
    activation: str = SILU
    centred_norms: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    softmax_scale: float | None = None
    window: Window | None = None

    @property
    def head_dim(self) -> int:
        return getattr(self.hf, "head_dim", None) or self.hf.hidden_size // self.hf.num_attention_heads

    @property
    def tied(self) -> bool:
        return bool(self.hf.tie_word_embeddings)


def _llama(name: str, hf: Any) -> Architecture:
    return Architecture(name, hf, Biases(qkv=hf.attention_bias, projection=hf.attention_bias, mlp=hf.mlp_bias))


def _qwen2(name: str, hf: Any) -> Architecture:
    return Architecture(name, hf, Biases(qkv=True))


def _qwen3(name: str, hf: Any) -> Architecture:
    return Architecture(name, hf, Biases(qkv=hf.attention_bias, projection=hf.attention_bias), qk_norm=True)


def _qwen3_moe(name: str, hf: Any) -> Architecture:
    sparse = tuple(
        int(layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0)
        for layer in range(hf.num_hidden_layers)
    )
    experts = Experts(hf.num_experts, hf.num_experts_per_tok, hf.moe_intermediate_size, hf.norm_topk_prob, sparse)
    return Architecture(name, hf, Biases(), qk_norm=True, experts=experts if any(sparse) else None)


def _mixtral(name: str, hf: Any) -> Architecture:
    sparse = (1,) * hf.num_hidden_layers
    experts = Experts(hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size, True, sparse)
    return Architecture(name, hf, Biases(), experts=experts)


def _gemma3(name: str, hf: Any) -> Architecture:
    windowed = tuple(int(kind == "sliding_attention") for kind in hf.layer_types)
    return Architecture(
        name,
        hf,
        Biases(),
        qk_norm=True,
        activation=GELU_TANH,
        centred_norms=True,
        post_norms=True,
        embedding_scale=hf.hidden_size**0.5,
        softmax_scale=hf.query_pre_attn_scalar**-0.5,
        window=Window(hf.sliding_window, windowed) if any(windowed) else None,
    )


FAMILIES: dict[str, Callable[[str, Any], Architecture]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "Gemma3ForCausalLM": _gemma3,
}


def read_architecture(folder: Path) -> Architecture:
    """Raises ValueError naming the folder and what is missing or unsupported in it."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    raw = json.loads(file.read_text())
    if problem := next(unsupported(raw), None):
        raise ValueError(f"{file}: {problem}")
    from transformers import AutoConfig

    name = raw["architectures"][0]
    return FAMILIES[name](name, AutoConfig.from_pretrained(folder))
