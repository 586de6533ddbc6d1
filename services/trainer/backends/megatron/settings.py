"""What the backend takes from a run's configuration, in the types that it works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from services.trainer.backends.megatron import cpu
from services.trainer.packing import Algorithm

if TYPE_CHECKING:
    from trireme.config import Config


@dataclass(frozen=True)
class Parallelism:
    """Ranks that share one copy of the model: each layer's tensors, the layers, a sequence, the experts.

    sequence: norms and residuals are sharded along the sequence over the `tensor` ranks too.
    first_stage, last_stage: layers of those pipeline stages, None for an even share. virtual: chunks of layers that
    each stage holds.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool = False
    first_stage: int | None = None
    last_stage: int | None = None
    virtual: int = 1

    @property
    def sequence_multiple(self) -> int:
        """What the length of each sequence is a multiple of: context-parallel ranks take it in twice as many chunks."""
        return 2 * self.context if self.context > 1 else 1


@dataclass(frozen=True)
class Router:
    """Of a mixture of experts. dtype: Megatron's name of it, None for the model's own."""

    frozen: bool
    dtype: str | None


@dataclass(frozen=True)
class Settings:
    """dtype: of the model's weights and compute; masters and moments are float32 in any case, gradients are when
    `distributed_data_parallel_config.grad_reduce_in_fp32` is set. publish_dtype: of the engine that samples.

    train, logprob: how micro-batches are formed. horizon: optimizer steps after which a decay is over.
    """

    dtype: torch.dtype
    publish_dtype: torch.dtype
    temperature: float
    recompute: bool
    shared_prefix: bool
    train: MicroBatching
    logprob: MicroBatching
    seed: int
    horizon: int
    optimizer: Any
    scheduler: Any
    ddp: Any
    rope_fusion: bool
    parallel: Parallelism
    router: Router


@dataclass(frozen=True)
class MicroBatching:
    """Up to `tokens` tokens in a micro-batch, packed by `algorithm`; or, when that is None, `sequences` sequences."""

    sequences: int
    tokens: int | None = None
    algorithm: Algorithm = "modified_first_fit_decreasing"


def from_config(config: Config) -> Settings:
    """Raises ValueError naming the key of a value that this backend cannot take."""
    policy = config.policy
    megatron = policy.megatron_cfg
    return Settings(
        dtype=getattr(torch, policy.precision),
        publish_dtype=getattr(torch, policy.generation.vllm_cfg.precision),
        temperature=policy.generation.temperature,
        recompute=megatron.activation_checkpointing,
        shared_prefix=_shared_prefix(config.trainer.shared_prefix, megatron.context_parallel_size),
        train=_micro_batching(policy, policy.train_micro_batch_size, "train_mb_tokens"),
        logprob=_micro_batching(policy, policy.logprob_batch_size, "logprob_mb_tokens"),
        seed=config.grpo.seed,
        horizon=config.optimizer_steps,
        optimizer=megatron.optimizer,
        scheduler=megatron.scheduler,
        ddp=megatron.distributed_data_parallel_config,
        rope_fusion=megatron.apply_rope_fusion,
        parallel=parallelism(megatron),
        router=Router(megatron.freeze_moe_router, megatron.moe_router_dtype),
    )


def parallelism(megatron: Any) -> Parallelism:
    """From `policy.megatron_cfg`."""
    return Parallelism(
        tensor=megatron.tensor_model_parallel_size,
        pipeline=megatron.pipeline_model_parallel_size,
        context=megatron.context_parallel_size,
        expert=megatron.expert_model_parallel_size,
        expert_tensor=megatron.expert_tensor_parallel_size,
        sequence=megatron.sequence_parallel,
        first_stage=megatron.num_layers_in_first_pipeline_stage,
        last_stage=megatron.num_layers_in_last_pipeline_stage,
        virtual=megatron.virtual_pipeline_model_parallel_size or 1,
    )


def _shared_prefix(wanted: bool | str, context_ranks: int) -> bool:
    possible = cpu.active() and context_ranks == 1
    if wanted is True and not possible:
        raise ValueError("trainer.shared_prefix=true needs a CPU and context_parallel_size=1; set it to auto")
    return possible if wanted == "auto" else bool(wanted)


def _micro_batching(policy: Any, sequences: int, key: str) -> MicroBatching:
    packing = policy.sequence_packing
    if packing.enabled:
        return MicroBatching(sequences, tokens=getattr(packing, key), algorithm=packing.algorithm)
    if policy.dynamic_batching.enabled:
        return MicroBatching(sequences, tokens=getattr(policy.dynamic_batching, key))
    return MicroBatching(sequences)
