"""`policy.generation`: sampling, and the vLLM engine that does it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from trireme.config.base import Block, ref
from trireme.config.blocks.megatron import Precision


class VllmConfig(Block):
    """Engine arguments of vLLM, named as vLLM names them."""

    async_engine: bool = Field(True, description="Use vLLM's asynchronous engine; here it always is.")
    precision: Precision = Field(ref("policy.precision"), description="Precision of weights and activations.")
    tensor_parallel_size: int = Field(1, ge=1, description="Devices that share each layer of one engine.")
    pipeline_parallel_size: int = Field(1, ge=1, description="Devices that the layers of one engine are dealt over.")
    gpu_memory_utilization: float = Field(
        0.6, gt=0, le=1, description="Share of the GPU's memory for weights and KV cache."
    )
    max_model_len: int = Field(
        ref("policy.max_total_sequence_length"), ge=2, description="Longest prompt plus response, in tokens."
    )
    enforce_eager: bool = Field(False, description="Run without compilation or CUDA graphs: faster start, slower run.")


class ColocatedResourcesConfig(Block):
    """Accelerators set apart for generation."""

    gpus_per_node: int | None = Field(None, ge=0, description="GPUs set apart for generation on each node.")
    num_nodes: int | None = Field(None, ge=0, description="Nodes set apart for generation.")


class ColocatedConfig(Block):
    """Whether generation and training share accelerators."""

    enabled: bool = Field(False, description="Generation and training take turns on the same accelerators.")
    resources: ColocatedResourcesConfig = Field(
        default_factory=ColocatedResourcesConfig, description="Accelerators for generation when they are not shared."
    )


class GenerationConfig(Block):
    """Sampling of training rollouts. Validation samples greedily whatever stands here."""

    backend: Literal["vllm"] = Field("vllm", description="Inference engine.")
    max_new_tokens: int = Field(
        ref("policy.max_total_sequence_length"), ge=1, description="Longest response, in tokens."
    )
    temperature: float = Field(
        1.0, ge=0.01, le=2, description="Sampling temperature; the trainer divides its logits by it too."
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling: probability mass kept; 1 keeps all.")
    top_k: int | None = Field(None, ge=1, description="Number of most likely tokens kept; null keeps all.")
    stop_token_ids: list[int] | None = Field(
        None, description="Token ids that end a response, beside the model's own end tokens."
    )
    stop_strings: list[str] | None = Field(None, description="Texts that end a response.")
    ignore_eos: bool = Field(
        False, description="Generate past the model's own end tokens, to max_new_tokens: for measurements of speed."
    )
    vllm_cfg: VllmConfig = Field(default_factory=VllmConfig, description="Engine arguments of vLLM.")
    vllm_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further engine arguments, handed to vLLM as they are."
    )
    colocated: ColocatedConfig = Field(
        default_factory=ColocatedConfig, description="Whether generation and training share accelerators."
    )
