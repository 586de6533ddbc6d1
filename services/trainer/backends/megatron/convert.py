"""Hugging Face weights to Megatron's and back, tensor by tensor.

One table (`rules`) says which Hugging Face tensors make up a Megatron parameter and how they are laid out in it; a
load and an export both follow it. Every parameter is written exactly once: what is missing, left over or of another
shape is an error that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.trainer.backends.megatron.model import Architecture

# In some older folders, though they are computed and not weights.
IGNORED = re.compile(r"rotary_emb\.inv_freq$|\.attention\.(masked_)?bias$")
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class Shapes:
    """What the layouts depend on."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Rule:
    """A Megatron parameter made of `sources`, with `{layer}` standing for the layer's number."""

    sources: tuple[str, ...]
    join: Callable[[list[Tensor], Shapes], Tensor]
    split: Callable[[Tensor, Shapes], list[Tensor]]


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
    return Rule(sources, lambda parts, _: torch.cat(parts), lambda weight, _: list(weight.chunk(len(sources))))


def _qkv(kind: str) -> Rule:
    names = (f"model.layers.{{layer}}.self_attn.{part}_proj.{kind}" for part in "qkv")
    return Rule(tuple(names), join_qkv, split_qkv)


_ATTENTION, _MLP = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."
_INPUT_NORM = _same("model.layers.{layer}.input_layernorm.weight")
_MLP_NORM = _same("model.layers.{layer}.post_attention_layernorm.weight")

# Llama, Qwen2 and Qwen3 name their tensors alike; each has a subset of these.
MODEL_RULES = {
    "embedding.word_embeddings.weight": _same("model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": _same("model.norm.weight"),
    "output_layer.weight": _same("lm_head.weight"),
}
LAYER_RULES = {
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
    "mlp.linear_fc1.weight": _stacked(_MLP + "gate_proj.weight", _MLP + "up_proj.weight"),
    "mlp.linear_fc1.bias": _stacked(_MLP + "gate_proj.bias", _MLP + "up_proj.bias"),
    "mlp.linear_fc2.weight": _same(_MLP + "down_proj.weight"),
    "mlp.linear_fc2.bias": _same(_MLP + "down_proj.bias"),
}


def find_rule(name: str) -> tuple[Rule, list[str]]:
    """The rule of a Megatron parameter and the Hugging Face names it stands for."""
    layer = LAYER.match(name)
    rule = LAYER_RULES.get(layer[2]) if layer else MODEL_RULES.get(name)
    if rule is None:
        raise ValueError(f"no Hugging Face tensor is known for the Megatron parameter {name}")
    return rule, [source.format(layer=layer[1] if layer else "") for source in rule.sources]


def shapes_of(architecture: Architecture) -> Shapes:
    hf = architecture.hf
    return Shapes(hf.num_attention_heads, hf.num_key_value_heads, architecture.head_dim)


class Folder:
    """The safetensors files of a Hugging Face folder, read lazily. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._where = self._index()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        return set(self._where)

    def read(self, name: str) -> Tensor:
        """Raises ValueError naming the tensor when the folder has none of that name."""
        if name not in self._where:
            raise ValueError(f"{self.folder} has no tensor {name}")
        return self._open(self._where[name]).get_tensor(name)

    def _index(self) -> dict[str, str]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            return json.loads(index.read_text())["weight_map"]
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{self.folder} holds no .safetensors file")
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118 (no mapping)

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            try:
                self._files[file] = self._stack.enter_context(safe_open(self.folder / file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{self.folder / file} cannot be read as safetensors: {error}") from error
        return self._files[file]


@torch.no_grad()
def load(model: torch.nn.Module, architecture: Architecture, folder: Path) -> None:
    """Write every parameter of `model` from `folder`, cast to its own dtype.

    Raises ValueError naming a tensor that is missing, of the wrong shape, written twice or not used.
    """
    shapes, used = shapes_of(architecture), set[str]()
    with Folder(folder) as source:
        for name, parameter in model.named_parameters():
            rule, names = find_rule(name)
            if twice := used.intersection(names):
                raise ValueError(f"tensor {sorted(twice)[0]} would be written twice, the second time to {name}")
            used.update(names)
            joined = rule.join([source.read(part) for part in names], shapes)
            if joined.shape != parameter.shape:
                raise ValueError(
                    f"{folder}: {' + '.join(names)} has shape {tuple(joined.shape)}, not {tuple(parameter.shape)}"
                )
            parameter.copy_(joined)
        _refuse_unused(source, used, architecture.tied)


def _refuse_unused(source: Folder, used: set[str], tied: bool) -> None:
    unused = {name for name in source.names() - used if not IGNORED.search(name)}
    if tied and "lm_head.weight" in unused:
        head, embedding = source.read("lm_head.weight"), source.read("model.embed_tokens.weight")
        if not torch.equal(head, embedding):
            raise ValueError(f"{source.folder}: tie_word_embeddings is true but lm_head.weight is not the embedding")
        unused.discard("lm_head.weight")
    if unused:
        raise ValueError(f"{source.folder} has tensors that this model does not use: {', '.join(sorted(unused)[:5])}")


@torch.no_grad()
def export(model: torch.nn.Module, architecture: Architecture, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The weights under Hugging Face names, one at a time, on the CPU; valid until the model changes."""
    shapes = shapes_of(architecture)
    for name, parameter in model.named_parameters():
        rule, names = find_rule(name)
        for part, tensor in zip(names, rule.split(parameter.detach(), shapes), strict=True):
            yield part, tensor.to("cpu", dtype)
