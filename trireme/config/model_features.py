"""What a model's config.json asks for that cannot be trained: the door of `config check` and of the trainer. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SILU, GELU_TANH = "silu", "gelu_pytorch_tanh"
# Each architecture, with the activation of its MLP.
ARCHITECTURES = {
    "LlamaForCausalLM": SILU,
    "Qwen2ForCausalLM": SILU,
    "Qwen3ForCausalLM": SILU,
    "Qwen3MoeForCausalLM": SILU,
    "MixtralForCausalLM": SILU,
    "Gemma3ForCausalLM": GELU_TANH,
}
# Scalings that do not depend on the length of the sequence at hand.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
GEMMA_SWITCHES = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention", "attention_bias")


def unsupported(hf_config: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each thing in a parsed config.json that is not supported; the first about its architecture."""
    name = (hf_config.get("architectures") or [f"none (model_type {hf_config.get('model_type')})"])[0]
    if name not in ARCHITECTURES:
        yield f"architecture {name} is not supported; supported are {', '.join(ARCHITECTURES)}"
        return
    if hf_config.get("quantization_config"):
        yield "quantized weights cannot be trained; use the model that they were made from"
    yield from _activation(hf_config, ARCHITECTURES[name])
    yield from _rope(hf_config)
    if hf_config.get("use_sliding_window") or (name == "MixtralForCausalLM" and hf_config.get("sliding_window")):
        yield "sliding-window attention is not supported; unset sliding_window"
    if name == "Qwen3MoeForCausalLM" and hf_config.get("attention_bias"):
        yield "attention_bias=true is not supported in a mixture of experts"
    if name == "Gemma3ForCausalLM":
        yield from _gemma(hf_config)


def _activation(hf_config: Mapping[str, Any], supported: str) -> Iterator[str]:
    for key in ("hidden_act", "hidden_activation"):
        if (hf_config.get(key) or supported) != supported:
            yield f"{key}={hf_config[key]!r} is not supported; supported is {supported}"


def _rope(hf_config: Mapping[str, Any]) -> Iterator[str]:
    for kind in rope_types(hf_config):
        if kind not in ROPE_TYPES:
            yield f"rope_type={kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"


def rope_types(hf_config: Mapping[str, Any]) -> list[str]:
    """Of the rotary embeddings: one, or one for each kind of layer."""
    parameters = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kinds = [each for each in parameters.values() if isinstance(each, Mapping)] or [parameters]
    return [kind.get("rope_type") or kind.get("type") or "default" for kind in kinds]


def _gemma(hf_config: Mapping[str, Any]) -> Iterator[str]:
    for key in GEMMA_SWITCHES:
        if hf_config.get(key):
            yield f"{key}={hf_config[key]} is not supported; unset it"
    layers = hf_config.get("layer_types")
    if layers and "full_attention" not in layers:
        yield "layer_types has no full_attention, which is not supported"
