"""The Hugging Face architectures that are supported, and what Megatron must know about each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Scalings that do not depend on the length of the sequence at hand.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


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
class Architecture:
    """A supported Hugging Face model: its configuration object and what Megatron needs beside it."""

    name: str
    hf: Any
    biases: Biases
    qk_norm: bool = False
    experts: Experts | None = None

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
    if hf.attention_bias:
        raise ValueError(f"{name}: attention_bias=true is not supported in a mixture of experts")
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


FAMILIES: dict[str, Callable[[str, Any], Architecture]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
}


def read_architecture(folder: Path) -> Architecture:
    """Raises ValueError naming the folder and what is missing or unsupported in it."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    names = json.loads(file.read_text()).get("architectures") or ["none named"]
    if names[0] not in FAMILIES:
        raise ValueError(f"{file}: architecture {names[0]} is not supported; supported are {', '.join(FAMILIES)}")
    from transformers import AutoConfig

    hf = AutoConfig.from_pretrained(folder)
    _refuse_unsupported(file, hf)
    return FAMILIES[names[0]](names[0], hf)


def _refuse_unsupported(file: Path, hf: Any) -> None:
    if hf.hidden_act != "silu":
        raise ValueError(f"{file}: hidden_act={hf.hidden_act!r} is not supported; supported is silu")
    if hf.rope_parameters["rope_type"] not in ROPE_TYPES:
        kinds = ", ".join(ROPE_TYPES)
        raise ValueError(f"{file}: rope_type={hf.rope_parameters['rope_type']!r} is not supported; supported: {kinds}")
    if getattr(hf, "use_sliding_window", False) or (hf.model_type == "mixtral" and hf.sliding_window):
        raise ValueError(f"{file}: sliding-window attention is not supported; unset sliding_window")
