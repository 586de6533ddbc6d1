"""Which Hugging Face tensors make up a Megatron parameter, how they lie in it, and how ranks share it: one table. Pure.

A load and an export both follow it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.backends.megatron.families import Architecture

EXPERT = re.compile(r"\.experts\.(\d+)\.")
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Shapes:
    """What the layouts depend on."""

    heads: int
    kv_heads: int
    head_dim: int


def shapes_of(architecture: Architecture) -> Shapes:
    hf = architecture.hf
    return Shapes(hf.num_attention_heads, hf.num_key_value_heads, architecture.head_dim)


@dataclass(frozen=True)
class Rule:
    """A Megatron parameter made of `sources`, with `{layer}` and `{expert}` standing for numbers.

    stacked: it is that many blocks along dimension 0, each of which is shared over the tensor-parallel ranks by itself.
    """

    sources: tuple[str, ...]
    join: Callable[[list[Tensor], Shapes], Tensor]
    split: Callable[[Tensor, Shapes], list[Tensor]]
    stacked: int = 1


def join_qkv(parts: list[Tensor], shapes: Shapes) -> Tensor:
    """q, k, v rows to Megatron's order: for each KV head its query heads, its key, its value."""
    groups, rest = shapes.kv_heads, parts[0].shape[1:]
    blocks = [part.reshape(groups, -1, shapes.head_dim, *rest) for part in parts]
    return torch.cat(blocks, 1).reshape(-1, *rest)


def split_qkv(weight: Tensor, shapes: Shapes) -> list[Tensor]:
    """Inverse of `join_qkv`."""
    per_group, rest = shapes.heads // shapes.kv_heads, weight.shape[1:]
    blocks = weight.reshape(shapes.kv_heads, per_group + 2, shapes.head_dim, *rest)
    return [part.reshape(-1, *rest) for part in blocks.split([per_group, 1, 1], 1)]


def _same(*sources: str) -> Rule:
    return Rule(sources, lambda parts, _: parts[0], lambda weight, _: [weight])


def _stacked(*sources: str) -> Rule:
    count = len(sources)
    return Rule(sources, lambda parts, _: torch.cat(parts), lambda weight, _: list(weight.chunk(count)), count)


def _qkv(kind: str) -> Rule:
    names = (f"model.layers.{{layer}}.self_attn.{part}_proj.{kind}" for part in "qkv")
    return Rule(tuple(names), join_qkv, split_qkv)


_ATTENTION, _MLP = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."
_INPUT_NORM = _same("model.layers.{layer}.input_layernorm.weight")
_MLP_NORM = _same("model.layers.{layer}.post_attention_layernorm.weight")  # named after what it follows

MODEL = {
    "embedding.word_embeddings.weight": _same("model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": _same("model.norm.weight"),
    "output_layer.weight": _same("lm_head.weight"),
}
ATTENTION = {
    "input_layernorm.weight": _INPUT_NORM,
    "self_attention.linear_qkv.layer_norm_weight": _INPUT_NORM,
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_qkv.bias": _qkv("bias"),
    "self_attention.q_layernorm.weight": _same(_ATTENTION + "q_norm.weight"),
    "self_attention.k_layernorm.weight": _same(_ATTENTION + "k_norm.weight"),
    "self_attention.linear_proj.weight": _same(_ATTENTION + "o_proj.weight"),
    "self_attention.linear_proj.bias": _same(_ATTENTION + "o_proj.bias"),
    "pre_mlp_layernorm.weight": _MLP_NORM,
    "mlp.linear_fc1.layer_norm_weight": _MLP_NORM,
}
MLP = {
    "mlp.linear_fc1.weight": _stacked(_MLP + "gate_proj.weight", _MLP + "up_proj.weight"),
    "mlp.linear_fc1.bias": _stacked(_MLP + "gate_proj.bias", _MLP + "up_proj.bias"),
    "mlp.linear_fc2.weight": _same(_MLP + "down_proj.weight"),
    "mlp.linear_fc2.bias": _same(_MLP + "down_proj.bias"),
}


def _experts(block: str, gate: str, up: str, down: str) -> dict[str, Rule]:
    """A mixture of experts whose Hugging Face module is `block`, with those names for each expert's matrices."""
    expert = f"model.layers.{{layer}}.{block}.experts.{{expert}}."
    return {
        "mlp.router.weight": _same(f"model.layers.{{layer}}.{block}.gate.weight"),
        "mlp.experts.linear_fc1.weight": _stacked(f"{expert}{gate}.weight", f"{expert}{up}.weight"),
        "mlp.experts.linear_fc2.weight": _same(f"{expert}{down}.weight"),
    }


DENSE = MODEL | ATTENTION | MLP
# A norm on either side of the MLP, and one behind the attention.
POST_NORMS = {
    "self_attention.linear_proj.post_layernorm.weight": _MLP_NORM,
    "pre_mlp_layernorm.weight": _same("model.layers.{layer}.pre_feedforward_layernorm.weight"),
    "mlp.linear_fc2.post_layernorm.weight": _same("model.layers.{layer}.post_feedforward_layernorm.weight"),
}
# Each architecture has a subset of these.
TABLES: dict[str, dict[str, Rule]] = {
    "LlamaForCausalLM": DENSE,
    "Qwen2ForCausalLM": DENSE,
    "Qwen3ForCausalLM": DENSE,
    "Qwen3MoeForCausalLM": DENSE | _experts("mlp", "gate_proj", "up_proj", "down_proj"),
    "MixtralForCausalLM": MODEL | ATTENTION | _experts("block_sparse_moe", "w1", "w3", "w2"),
    "Gemma3ForCausalLM": DENSE | POST_NORMS,
}


def find_rule(architecture: str, name: str) -> tuple[Rule, list[str]]:
    """The rule of a Megatron parameter and the Hugging Face names it stands for. Layers and experts in `name` are
    numbered as in the whole model, not as on a rank."""
    layer, expert = LAYER.match(name), EXPERT.search(name)
    kind = EXPERT.sub(".experts.", layer[2] if layer else name)
    rule = TABLES[architecture].get(kind)
    if rule is None:
        raise ValueError(f"{architecture}: no Hugging Face tensor is known for the Megatron parameter {name}")
    numbers = {"layer": layer[1] if layer else "", "expert": expert[1] if expert else ""}
    return rule, [source.format(**numbers) for source in rule.sources]


def shard(whole: Tensor, dim: int, stacked: int, rank: int, ranks: int) -> Tensor:
    """The part of `whole` that a tensor-parallel rank holds: an even share, along `dim`, of each stacked block.

    Raises ValueError when it cannot be shared evenly.
    """
    if whole.shape[dim] % (stacked * ranks):
        raise ValueError(f"{whole.shape[dim]} rows of {stacked} blocks cannot be shared over {ranks} ranks")
    return torch.cat([block.chunk(ranks, dim)[rank] for block in whole.chunk(stacked, dim)], dim)


def unshard(parts: Sequence[Tensor], dim: int, stacked: int) -> Tensor:
    """Inverse of `shard`, from the parts of all ranks in order."""
    blocks = [part.chunk(stacked, dim) for part in parts]
    return torch.cat([each[index] for index in range(stacked) for each in blocks], dim)


def pad_rows(whole: Tensor, rows: int) -> Tensor:
    """`whole` with zeros below, up to `rows`."""
    return torch.cat([whole, whole.new_zeros(rows - len(whole), *whole.shape[1:])]) if rows > len(whole) else whole
