"""Rules about schedules, precision, rewards and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trireme.config.rules.registry import Rule, rule_into

if TYPE_CHECKING:
    from trireme.config.root import Config

RULES: list[Rule] = []
rule = rule_into(RULES)
OPTIMIZER = "policy.megatron_cfg.optimizer"
SCHEDULER = "policy.megatron_cfg.scheduler"
VLLM = "policy.generation.vllm_cfg"
# Engine arguments that have a key of their own.
ENGINE_KEYS = {
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer.name",
    "dtype": f"{VLLM}.precision",
    "max_model_len": f"{VLLM}.max_model_len",
    "enforce_eager": f"{VLLM}.enforce_eager",
    "tensor_parallel_size": f"{VLLM}.tensor_parallel_size",
    "pipeline_parallel_size": f"{VLLM}.pipeline_parallel_size",
    "gpu_memory_utilization": f"{VLLM}.gpu_memory_utilization",
    "seed": "grpo.seed",
}
# Those that make sampled log-probs the policy's own, and weight updates possible; the rollout service sets them.
ENGINE_FIXED = ("logprobs_mode", "generation_config", "worker_extension_cls")


@rule("learning-rates-in-order")
def _learning_rates(config: Config) -> Iterator[str]:
    """min_lr and lr_warmup_init are not above lr, where they are used."""
    megatron = config.policy.megatron_cfg
    peak = megatron.optimizer.lr
    if megatron.scheduler.lr_decay_style != "constant" and megatron.optimizer.min_lr > peak:
        yield f"{OPTIMIZER}.min_lr ({megatron.optimizer.min_lr}) is above {OPTIMIZER}.lr ({peak}): at most that"
    start = megatron.scheduler.lr_warmup_init
    if megatron.scheduler.lr_warmup_iters > 0 and start > peak:
        yield f"{SCHEDULER}.lr_warmup_init ({start}) is above {OPTIMIZER}.lr ({peak}): at most that"


@rule("warm-up-before-decay")
def _warm_up(config: Config) -> Iterator[str]:
    """The warm-up ends before the decay does, which without lr_decay_iters is at the end of the run."""
    scheduler = config.policy.megatron_cfg.scheduler
    if scheduler.lr_decay_style == "constant":
        return
    decay, key = scheduler.lr_decay_iters, f"{SCHEDULER}.lr_decay_iters"
    if decay is None:
        decay, key = config.optimizer_steps, "the optimizer steps of grpo.max_num_steps"
    if scheduler.lr_warmup_iters >= decay:
        yield (
            f"{SCHEDULER}.lr_warmup_iters ({scheduler.lr_warmup_iters}) is not below {key} ({decay}): "
            + (f"lr_warmup_iters={decay - 1} or fewer" if decay > 1 else "lr_warmup_iters=0")
        )


@rule("optimizer-precision")
def _precision(config: Config) -> Iterator[str]:
    """The bf16 and fp16 flags of the optimiser say what policy.precision says."""
    optimizer, precision = config.policy.megatron_cfg.optimizer, config.policy.precision
    for flag, dtype in ((optimizer.bf16, "bfloat16"), (optimizer.fp16, "float16")):
        name = "bf16" if dtype == "bfloat16" else "fp16"
        if flag != (precision == dtype):
            yield (
                f"{OPTIMIZER}.{name} is {str(flag).lower()} but policy.precision is {precision}: "
                f"{OPTIMIZER}.{name}={str(not flag).lower()}, or leave it out"
            )


@rule("pipeline-dtype")
def _pipeline_dtype(config: Config) -> Iterator[str]:
    """Activations are sent between stages in the precision that they have."""
    sent, precision = config.policy.megatron_cfg.pipeline_dtype, config.policy.precision
    if sent != precision:
        yield (
            f"policy.megatron_cfg.pipeline_dtype is {sent} but policy.precision is {precision}: "
            f"pipeline_dtype={precision}, or leave it out"
        )


@rule("reward-scaling-interval")
def _scaling(config: Config) -> Iterator[str]:
    """The intervals of reward scaling are not empty."""
    scaling = config.grpo.reward_scaling
    for low, high in (("source_min", "source_max"), ("target_min", "target_max")):
        if scaling.enabled and getattr(scaling, low) >= getattr(scaling, high):
            yield (
                f"grpo.reward_scaling.{low} ({getattr(scaling, low)}) is not below grpo.reward_scaling.{high} "
                f"({getattr(scaling, high)})"
            )


@rule("batch-multiplier")
def _batch_multiplier(config: Config) -> Iterator[str]:
    """More prompts than a step needs are generated only under dynamic sampling."""
    if config.grpo.batch_multiplier > 1 and not config.grpo.use_dynamic_sampling:
        yield (
            f"grpo.batch_multiplier is {config.grpo.batch_multiplier} but grpo.use_dynamic_sampling is false: "
            "batch_multiplier=1, or use_dynamic_sampling=true"
        )


@rule("one-system-prompt")
def _system_prompt(config: Config) -> Iterator[str]:
    """The system message comes from one place."""
    if config.data.system_prompt is not None and config.data.system_prompt_file is not None:
        yield "data.system_prompt and data.system_prompt_file are both set; set one to null"


@rule("vllm-kwargs")
def _vllm_kwargs(config: Config) -> Iterator[str]:
    """Free engine arguments change neither what has a key of its own nor what training relies on."""
    given = [key for key, value in config.policy.generation.vllm_kwargs.items() if value is not None]
    for key in given:
        if key in ENGINE_FIXED:
            yield f"policy.generation.vllm_kwargs.{key} is set by the rollout service: leave it out"
        elif key in ENGINE_KEYS:
            yield f"policy.generation.vllm_kwargs.{key} has a key of its own: set {ENGINE_KEYS[key]} instead"


@rule("checkpoint-metric")
def _checkpoint_metric(config: Config) -> Iterator[str]:
    """The metric that ranks checkpoints is one that a step records."""
    name = config.checkpointing.ranked_by
    if name is not None and not name.startswith(("train/", "validation/", "timing/")):
        yield (
            f"checkpointing.metric_name is {name}, which no step records: validation/accuracy, train/reward, or "
            "another as metrics.jsonl names it"
        )
