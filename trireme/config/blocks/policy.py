"""`policy`: the model under training, its batches and lengths, its backend and its generation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from trireme.config.base import Block, ref
from trireme.config.blocks.dtensor import DTensorConfig
from trireme.config.blocks.generation import GenerationConfig
from trireme.config.blocks.megatron import MegatronConfig, Precision

PackingAlgorithm = Literal[
    "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"
]
TRAIN_TOKENS = ref("mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}")
LOGPROB_TOKENS = ref("mul:${policy.max_total_sequence_length},${policy.logprob_batch_size}")


class TokenizerConfig(Block):
    """The tokenizer and the template that turns messages into tokens."""

    name: str = Field(ref("policy.model_name"), min_length=1, description="Folder or name of the tokenizer.")
    chat_template: str | None = Field(
        None, description="Jinja chat template in place of the tokenizer's own; null keeps its own."
    )


class SequencePackingConfig(Block):
    """Several sequences back to back in one row, without padding and without attention between them."""

    enabled: bool = Field(True, description="Pack sequences.")
    train_mb_tokens: int = Field(TRAIN_TOKENS, ge=1, description="Capacity of a training micro-batch, in tokens.")
    logprob_mb_tokens: int = Field(LOGPROB_TOKENS, ge=1, description="Capacity of a log-prob micro-batch, in tokens.")
    algorithm: PackingAlgorithm = Field(
        "modified_first_fit_decreasing", description="How sequences are assigned to micro-batches."
    )
    sequence_length_round: int = Field(64, ge=1, description="Packed rows are padded to a multiple of this, in tokens.")


class DynamicBatchingConfig(Block):
    """Micro-batches of a token budget, with padding."""

    enabled: bool = Field(False, description="Fill micro-batches by tokens in place of by sequences.")
    train_mb_tokens: int = Field(TRAIN_TOKENS, ge=1, description="Capacity of a training micro-batch, in tokens.")
    logprob_mb_tokens: int = Field(LOGPROB_TOKENS, ge=1, description="Capacity of a log-prob micro-batch, in tokens.")
    sequence_length_round: int = Field(64, ge=1, description="Sequences are padded to a multiple of this, in tokens.")


class OptimizerConfig(Block):
    """An optimiser by its class, for the DTensor backend."""

    name: str = Field(min_length=1, description="Import path of the optimiser class.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Its arguments.")


class PolicyConfig(Block):
    """The model under training."""

    model_name: str = Field(min_length=1, description="Folder of the Hugging Face model to start from, or its name.")
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig, description="Tokenizer and chat template.")
    train_global_batch_size: int = Field(
        ref("mul:${grpo.num_prompts_per_step},${grpo.num_generations_per_prompt}"),
        ge=1,
        description="Samples in one optimiser step, over all ranks.",
    )
    train_micro_batch_size: int = Field(4, ge=1, description="Samples in one forward and backward pass of a rank.")
    generation_batch_size: int = Field(
        32, ge=1, description="Samples generated at a time by a batch engine; vLLM schedules by itself."
    )
    logprob_batch_size: int = Field(4, ge=1, description="Samples in one forward pass that only computes log-probs.")
    max_total_sequence_length: int = Field(512, ge=2, description="Longest prompt plus response, in tokens.")
    precision: Precision = Field(
        "bfloat16",
        description="Compute precision. `auto` becomes bfloat16 where the hardware multiplies it natively, "
        "else float32, when the configuration is loaded.",
    )
    make_sequence_length_divisible_by: int | None = Field(
        None,
        ge=1,
        description="Checked against what the layout needs, in tokens. Sequences are filled up to that and no further, "
        "whatever is given.",
    )
    max_grad_norm: float = Field(1.0, ge=0, description="Largest global gradient norm; 0 does not clip.")
    optimizer: OptimizerConfig | None = Field(None, description="Optimiser of the DTensor backend.")
    scheduler: list[dict[str, Any]] | None = Field(None, description="Schedulers of the DTensor backend, in order.")
    dtensor_cfg: DTensorConfig = Field(default_factory=DTensorConfig, description="The PyTorch DTensor backend.")
    megatron_cfg: MegatronConfig = Field(default_factory=MegatronConfig, description="The Megatron-Core backend.")
    sequence_packing: SequencePackingConfig = Field(
        default_factory=SequencePackingConfig, description="Packing of sequences into micro-batches."
    )
    dynamic_batching: DynamicBatchingConfig = Field(
        default_factory=DynamicBatchingConfig, description="Micro-batches by token budget with padding."
    )
    generation: GenerationConfig = Field(default_factory=GenerationConfig, description="Sampling and its engine.")
