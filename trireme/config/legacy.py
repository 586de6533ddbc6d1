"""Names that NeMo-RL's files carry and this project reads differently: renamed, ignored, or known and not supported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trireme.config.errors import ConfigError

# Old name -> name now.
RENAMED = {
    "loss_fn.ratio_eps_min": "loss_fn.ratio_clip_min",
    "loss_fn.ratio_eps_max": "loss_fn.ratio_clip_max",
    "data.train_data_path": "data.train_file",
    "data.val_data_path": "data.validation_file",
}


@dataclass(frozen=True)
class WithoutEffect:
    """Why a key of the schema changes nothing, and the values of it that ask for nothing (beside null)."""

    why: str
    silent: tuple[Any, ...] = ()


NO_GPU_RECORDER = WithoutEffect("take GPU use from the metrics of the machine", silent=(False,))
WHO_HAS_WHAT = WithoutEffect("rollout.replicas and trainer.nproc say who has what")
NOTHING_IS_PADDED = WithoutEffect(
    "sequences are laid end to end, with no more padding than a layout needs", silent=(64,)
)
OTHER_BACKEND = WithoutEffect("it belongs to the DTensor backend")

# Keys of the schema that load, keep their value and change nothing. `*` stands for any name.
WITHOUT_EFFECT = {
    "env.*.num_workers": WithoutEffect("reward.workers says how many scoring processes a server has"),
    "policy.sequence_packing.sequence_length_round": NOTHING_IS_PADDED,
    "policy.dynamic_batching.sequence_length_round": NOTHING_IS_PADDED,
    "policy.generation_batch_size": WithoutEffect("vLLM schedules by itself"),
    "policy.optimizer": OTHER_BACKEND,
    "policy.scheduler": OTHER_BACKEND,
    "policy.megatron_cfg.converter_type": WithoutEffect("the architecture is read from config.json"),
    "policy.megatron_cfg.empty_unused_memory_level": WithoutEffect("generation has its own process", silent=(0,)),
    "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather": WithoutEffect(
        "a step's weights are published, and so gathered, before the next pass", silent=(False,)
    ),
    "policy.megatron_cfg.distributed_data_parallel_config.average_in_collective": WithoutEffect(
        "losses are divided by the whole batch"
    ),
    "policy.generation.vllm_cfg.async_engine": WithoutEffect("the engine is always asynchronous", silent=(True,)),
    "policy.generation.colocated.enabled": WithoutEffect("rollout servers are own processes", silent=(False,)),
    "policy.generation.colocated.resources.gpus_per_node": WHO_HAS_WHAT,
    "policy.generation.colocated.resources.num_nodes": WHO_HAS_WHAT,
    "logger.monitor_gpus": NO_GPU_RECORDER,
    "logger.gpu_monitoring.collection_interval": NO_GPU_RECORDER,
    "logger.gpu_monitoring.flush_interval": NO_GPU_RECORDER,
}


def _off(value: Any) -> bool:
    """Whether a value switches nothing on."""
    if isinstance(value, dict):
        return _off(value.get("enabled")) if "enabled" in value else all(map(_off, value.values()))
    return value in (None, False, 0, "none", [])


def _any(value: Any) -> bool:
    return True


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or value in values


def _grpo_estimator(value: Any) -> bool:
    return _off(value) or (isinstance(value, dict) and value.get("name", "grpo") == "grpo")


@dataclass(frozen=True)
class Foreign:
    """A NeMo-RL key outside the schema: the values that may be dropped, why, and what to do about any other."""

    harmless: Callable[[Any], bool]
    why: str
    instead: str = "leave it out"


SPEED = Foreign(_any, "it changes speed or memory on GPUs, never the result")
ABSENT = Foreign(_off, "the feature is off")
DATASET = Foreign(_off, "the feature is off", "use data.dataset_name, data.train_file and data.validation_file")

# Keys of NeMo-RL outside the schema. A harmless value is dropped and reported; any other is refused as not supported.
FOREIGN = {
    "grpo.val_at_end": ABSENT,
    "grpo.adv_estimator": Foreign(_grpo_estimator, "grpo is the estimator"),
    "grpo.reward_shaping.stop_properly_penalty_coef": ABSENT,
    "grpo.seq_logprob_error_threshold": ABSENT,
    "grpo.async_grpo.recompute_kv_cache_after_weight_updates": Foreign(_any, "caches never outlive a weight version"),
    "loss_fn.kl_input_clamp_value": Foreign(_one_of(20, 20.0), "it is 20 here"),
    "loss_fn.kl_output_clamp_value": Foreign(_one_of(10, 10.0), "it is 10 here"),
    "loss_fn.use_kl_in_reward": ABSENT,
    "checkpointing.checkpoint_must_save_by": ABSENT,
    "checkpointing.model_save_format": Foreign(_any, "a checkpoint has one format here"),
    "checkpointing.save_consolidated": Foreign(_any, "a checkpoint has one format here"),
    "checkpointing.save_optimizer": Foreign(_one_of(True), "the optimiser is always saved"),
    "policy.tokenizer.chat_template_kwargs": ABSENT,
    "policy.hf_config_overrides": ABSENT,
    "policy.logprob_chunk_size": SPEED,
    "policy.offload_optimizer_for_logprob": SPEED,
    "policy.refit_buffer_size_gb": SPEED,
    "policy.draft": ABSENT,
    "policy.reward_model_cfg": ABSENT,
    "policy.dtensor_cfg._v2": Foreign(_any, "it belongs to the DTensor backend"),
    "policy.dtensor_cfg.automodel_kwargs": Foreign(_any, "it belongs to the DTensor backend"),
    "policy.dtensor_cfg.lora_cfg": ABSENT,
    "policy.megatron_cfg.force_reconvert_from_hf": Foreign(_any, "weights are read from the Hugging Face folder"),
    "policy.megatron_cfg.moe_permute_fusion": SPEED,
    "policy.megatron_cfg.moe_per_layer_logging": ABSENT,
    "policy.megatron_cfg.moe_enable_deepep": ABSENT,
    "policy.megatron_cfg.moe_token_dispatcher_type": SPEED,
    "policy.megatron_cfg.moe_shared_expert_overlap": SPEED,
    "policy.megatron_cfg.bias_activation_fusion": SPEED,
    "policy.megatron_cfg.gradient_accumulation_fusion": SPEED,
    "policy.megatron_cfg.defer_fp32_logits": SPEED,
    "policy.megatron_cfg.peft": ABSENT,
    "policy.megatron_cfg.fp8_cfg": ABSENT,
    "policy.megatron_cfg.env_vars": ABSENT,
    "policy.megatron_cfg.optimizer.optimizer_cpu_offload": ABSENT,
    "policy.megatron_cfg.optimizer.optimizer_offload_fraction": ABSENT,
    "policy.generation.mcore_generation_config": Foreign(_any, "vLLM is the engine"),
    "policy.generation.vllm_cfg.expert_parallel_size": Foreign(_one_of(1), "it is 1 here"),
    "policy.generation.vllm_cfg.kv_cache_dtype": Foreign(_one_of("auto"), "it is auto here"),
    "policy.generation.vllm_cfg.use_deep_gemm": ABSENT,
    "policy.generation.vllm_cfg.num_last_layers_in_bf16": ABSENT,
    "policy.generation.vllm_cfg.num_first_layers_in_bf16": ABSENT,
    "policy.generation.vllm_cfg.enable_vllm_metrics_logger": Foreign(_any, "vLLM's metrics are on /metrics"),
    "policy.generation.vllm_cfg.vllm_metrics_logger_interval": Foreign(_any, "vLLM's metrics are on /metrics"),
    "data.num_workers": Foreign(_any, "prompts are prepared by the trainer itself"),
    "data.use_multiple_dataloader": ABSENT,
    "data.train": DATASET,
    "data.validation": DATASET,
    "data.default": DATASET,
    "env.math.math_verify_impl": Foreign(_one_of("hf_math_verify"), "math-verify is the verifier"),
    "logger.swanlab_enabled": ABSENT,
    "logger.swanlab": Foreign(_any, "there is no SwanLab recorder"),
    "logger.trackio_enabled": ABSENT,
    "logger.trackio": Foreign(_any, "there is no Trackio recorder"),
}


def rename(tree: dict[str, Any]) -> list[str]:
    """Move values from old names to new ones, in place; one notice for each. Raises ConfigError where both stand."""
    notices = []
    for old, new in RENAMED.items():
        if not _has(tree, old):
            continue
        if _has(tree, new):
            raise ConfigError(f"{old} is the old name of {new}, and both are set; keep {new}")
        _put(tree, new, _take(tree, old))
        notices.append(f"{old} is now called {new}")
    return notices


def drop_foreign(tree: dict[str, Any]) -> list[str]:
    """Remove NeMo-RL's keys that mean nothing here, in place; one notice for each.

    Raises ConfigError for those that would mean something.
    """
    present = {path: _take(tree, path) for path in FOREIGN if _has(tree, path)}
    refused = [
        f"{path}={value!r} is not yet supported; {FOREIGN[path].instead}"
        for path, value in present.items()
        if not FOREIGN[path].harmless(value)
    ]
    if refused:
        raise ConfigError(refused)
    return [f"{path} is ignored: {FOREIGN[path].why}" for path in present]


def without_effect(tree: dict[str, Any]) -> list[str]:
    """One notice for each key in the tree that loads but changes nothing."""
    return [
        f"{path} is ignored: {row.why}"
        for pattern, row in WITHOUT_EFFECT.items()
        for path in _expand(tree, pattern)
        if not _among(_get(tree, path), (None, *row.silent))
    ]


def drop_silent(tree: dict[str, Any], default_of: Callable[[str], Any]) -> None:
    """Remove keys that change nothing and have their default value, in place: a written file need not carry them."""
    for pattern in WITHOUT_EFFECT:
        for path in _expand(tree, pattern):
            if _among(_get(tree, path), (default_of(pattern),)):
                _take(tree, path)


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    """Membership that tells False from 0 and True from 1."""
    return any(value == other and type(value) is type(other) for other in values)


def _expand(tree: dict[str, Any], pattern: str) -> list[str]:
    """The paths in the tree that fit a pattern."""
    head, star, tail = pattern.partition("*")
    block = _get(tree, head.rstrip(".")) if star else None
    names = block if isinstance(block, dict) else {}
    candidates = [f"{head}{name}{tail}" for name in names] if star else [pattern]
    return [path for path in candidates if _has(tree, path)]


def _get(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _has(tree: dict[str, Any], path: str) -> bool:
    parent, _, name = path.rpartition(".")
    block = _get(tree, parent) if parent else tree
    return isinstance(block, dict) and name in block


def _take(tree: dict[str, Any], path: str) -> Any:
    parent, _, name = path.rpartition(".")
    block: dict[str, Any] = _get(tree, parent) if parent else tree
    return block.pop(name)


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = value
