"""Runs inside vLLM's worker processes (`worker_extension_cls`): takes new weights from a segment into the model.

Loading goes through vLLM's layerwise reload, which gives each layer the layout it was created with, loads it, and
processes it again. Writing into the parameters directly fails on a CPU, where linear weights are packed at start,
and leaves a model that is half new. Two things vLLM does not do, and answers from wrong weights without an error: the
head of a tied model keeps the packed copy of the weights it was created from (`_refresh_tied_heads`), and the experts
of a mixture are not packed again (`_forget_expert_kernels`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from trireme.contracts.v1.weights_pb2 import WeightManifest
from trireme.weights.manifest import WeightsError
from trireme.weights.segment import Segment

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TiedPair = tuple[ParallelLMHead, VocabParallelEmbedding]


class WeightReceiver:
    """Mixed into vLLM's worker class."""

    if TYPE_CHECKING:
        vllm_config: VllmConfig
        model_runner: Any

    def trireme_load_weights(self, path: str, manifest: bytes) -> None:
        """Load every tensor of the segment at `path`. Raises WeightsError naming what the model has not received.

        The model is unusable after an error, until a load succeeds. The caller has paused generation.
        """
        described = WeightManifest.FromString(manifest)
        model = self.model_runner.get_model()
        with Segment.open(Path(path), described) as segment, set_current_vllm_config(self.vllm_config):
            reload(model, self.vllm_config.model_config, segment)
        for forget in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            if hasattr(self.model_runner, forget):
                getattr(self.model_runner, forget)()


def reload(model: nn.Module, model_config: Any, segment: Segment) -> None:
    """Replace all weights of `model` by the segment's."""
    tied = list(_tied_heads(model))
    if current_platform.is_cpu():
        _forget_expert_kernels(model)
    initialize_layerwise_reload(model)
    try:
        model.load_weights(segment.tensors())  # type: ignore[operator]
        unfilled = list(_unfilled(model, {id(head) for head, _ in tied}))
    finally:
        # Also after an error: it puts the parameters back in place, without which the model could not load again.
        finalize_layerwise_reload(model, model_config)
    if unfilled:
        raise WeightsError(
            f"weights version {segment.manifest.version} left parameters unwritten: {', '.join(unfilled[:8])}"
        )
    _refresh_tied_heads(tied)


def _tied_heads(model: nn.Module) -> Iterator[TiedPair]:
    """Heads that share their parameter with an embedding."""
    embeddings = [
        m for m in model.modules() if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)
    ]
    for head in model.modules():
        if isinstance(head, ParallelLMHead):
            yield from ((head, e) for e in embeddings if e.weight is head.weight)


def _forget_expert_kernels(model: nn.Module) -> None:
    """Experts are packed for their kernel when it is made: so have it made again, from the new weights."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def _unfilled(model: nn.Module, tied_heads: set[int]) -> Iterator[str]:
    """Modules that received fewer elements than they have, vocabulary padding aside."""
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        # Complete modules have been processed and forgotten by now.
        if not info.can_load() or id(module) in tied_heads or is_deferred_attention_layer(module):
            continue
        if info.load_numel < (expected := _loadable(module)):
            yield f"{name or type(module).__name__} ({info.load_numel} of {expected} elements)"


def _loadable(module: nn.Module) -> int:
    """Elements that a checkpoint brings for `module`: those of its parameters, without rows that pad a vocabulary."""
    total = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    if not isinstance(module, VocabParallelEmbedding):
        return total
    return total // module.num_embeddings_per_partition * module.shard_indices.num_org_elements


def _refresh_tied_heads(tied: list[TiedPair]) -> None:
    """Give each tied head the embedding's parameter again and, on a CPU, a packed copy of the new values.

    On a GPU the head computes from the shared parameter itself, and nothing happens here.
    """
    for head, embedding in tied:
        if head.weight is not embedding.weight:
            head.weight = embedding.weight
        if current_platform.is_cpu():
            head.quant_method.process_weights_after_loading(head)
