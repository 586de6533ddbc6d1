"""`policy.megatron_cfg`: Megatron-Core as the training backend, with its optimiser, schedule and data parallelism."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trireme.config.base import Block, ref

Precision = Literal["bfloat16", "float16", "float32"]


class MegatronOptimizerConfig(Block):
    """Megatron-Core's optimiser. Master weights are float32 whatever the compute precision is."""

    optimizer: Literal["adam", "sgd"] = Field("adam", description="Optimisation algorithm.")
    lr: float = Field(5e-6, ge=0, description="Peak learning rate.")
    min_lr: float = Field(5e-7, ge=0, description="Learning rate at the end of the decay.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
    bf16: bool = Field(
        ref("is:${policy.precision},bfloat16"), description="Model weights are bfloat16; follows policy.precision."
    )
    fp16: bool = Field(
        ref("is:${policy.precision},float16"), description="Model weights are float16; follows policy.precision."
    )
    params_dtype: Literal["float32"] = Field("float32", description="Precision of the master weights.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of Adam's first moment for each step.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Decay of Adam's second moment for each step.")
    adam_eps: float = Field(1e-8, gt=0, description="Term added to Adam's denominator.")
    sgd_momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of SGD.")
    use_distributed_optimizer: bool = Field(True, description="Shard optimiser state over data-parallel ranks.")
    use_precision_aware_optimizer: bool = Field(
        True, description="Let Transformer Engine keep optimiser state in the precision it wants; no effect without it."
    )
    clip_grad: float = Field(ref("policy.max_grad_norm"), ge=0, description="Largest global gradient norm; 0 is off.")


class MegatronSchedulerConfig(Block):
    """Learning rate and weight decay over the steps of the run."""

    start_weight_decay: float = Field(
        ref("policy.megatron_cfg.optimizer.weight_decay"), ge=0, description="Weight decay at the first step."
    )
    end_weight_decay: float = Field(
        ref("policy.megatron_cfg.optimizer.weight_decay"), ge=0, description="Weight decay at the last step."
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Course of the weight decay from start to end."
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = Field(
        "constant", description="Course of the learning rate after warm-up."
    )
    lr_decay_iters: int | None = Field(
        None,
        ge=1,
        description="Optimizer steps until the rate is `min_lr`; null takes those of the whole run.",
    )
    lr_warmup_iters: int = Field(13, ge=0, description="Optimizer steps from `lr_warmup_init` to `lr`; 0 has none.")
    lr_warmup_init: float = Field(5e-7, ge=0, description="Learning rate at the first step of the warm-up.")


class DistributedDataParallelConfig(Block):
    """How gradients and sharded parameters travel between data-parallel ranks."""

    grad_reduce_in_fp32: bool = Field(False, description="Accumulate and reduce gradients in float32.")
    overlap_grad_reduce: bool = Field(True, description="Reduce gradients during the backward pass (CUDA only).")
    overlap_param_gather: bool = Field(
        True, description="Of no effect: a step's weights are published, and so gathered, before the next pass."
    )
    average_in_collective: bool = Field(
        True, description="Average in the collective; here gradients are always divided by the global batch."
    )
    use_custom_fsdp: bool = Field(False, description="Shard with Megatron's own FSDP.")
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = Field(
        "optim_grads_params", description="What Megatron's own FSDP shards; no effect without it."
    )


class MegatronConfig(Block):
    """Megatron-Core: parallel layout and model options."""

    enabled: bool = Field(False, description="Train with Megatron-Core.")
    empty_unused_memory_level: int = Field(
        0, ge=0, le=2, description="How eagerly cached GPU memory is released between phases: 0 never, 2 most."
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, about a third more compute."
    )
    converter_type: str | None = Field(None, description="Architecture name; here it is read from config.json.")
    tensor_model_parallel_size: int = Field(1, ge=1, description="Ranks that share each layer (TP).")
    expert_tensor_parallel_size: int = Field(1, ge=1, description="Ranks that share each expert.")
    expert_model_parallel_size: int = Field(1, ge=1, description="Ranks that the experts are dealt over (EP).")
    pipeline_model_parallel_size: int = Field(1, ge=1, description="Stages that the layers are dealt over (PP).")
    virtual_pipeline_model_parallel_size: int | None = Field(
        None, ge=2, description="Chunks of layers that each stage holds, which shortens its idle time; null is one."
    )
    num_layers_in_first_pipeline_stage: int | None = Field(
        None, ge=1, description="Layers in the first stage; null divides evenly."
    )
    num_layers_in_last_pipeline_stage: int | None = Field(
        None, ge=1, description="Layers in the last stage; null divides evenly."
    )
    context_parallel_size: int = Field(1, ge=1, description="Ranks that share each sequence (CP).")
    pipeline_dtype: Precision = Field(
        ref("policy.precision"), description="Precision of activations sent between stages."
    )
    sequence_parallel: bool = Field(
        False, description="Shard norms and residuals along the sequence over the tensor-parallel ranks."
    )
    freeze_moe_router: bool = Field(True, description="Do not train the routers of a mixture of experts.")
    moe_router_dtype: Literal["fp32", "fp64"] | None = Field("fp64", description="Precision of the router.")
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "sinkhorn"] = Field(
        "none", description="Load balancing of the router."
    )
    moe_aux_loss_coeff: float = Field(0.0, ge=0, description="Weight of the router's load-balancing loss.")
    moe_router_bias_update_rate: float = Field(0.0, ge=0, description="Rate of the router's expert-bias update.")
    apply_rope_fusion: bool = Field(True, description="Fused rotary embedding (Transformer Engine only).")
    optimizer: MegatronOptimizerConfig = Field(
        default_factory=MegatronOptimizerConfig, description="Optimiser of the Megatron-Core backend."
    )
    scheduler: MegatronSchedulerConfig = Field(
        default_factory=MegatronSchedulerConfig, description="Learning-rate and weight-decay schedule."
    )
    distributed_data_parallel_config: DistributedDataParallelConfig = Field(
        default_factory=DistributedDataParallelConfig, description="Communication between data-parallel ranks."
    )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model: TP · CP · PP."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size
