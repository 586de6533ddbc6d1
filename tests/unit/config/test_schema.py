"""The names and defaults of NeMo-RL v0.3 are here, all of them."""

from __future__ import annotations

import inspect
from operator import attrgetter

import pytest

from tests.unit.config.support import make
from trireme.config import schema
from trireme.config.root import Config

# The names that NeMo-RL v0.3 documents with a default, and the default: written down by hand, not read from the models.
DEFAULTS = {
    "grpo": dict(
        num_prompts_per_step=32,
        num_generations_per_prompt=16,
        max_rollout_turns=1,
        max_num_steps=1000000,
        max_num_epochs=1,
        normalize_rewards=True,
        use_leave_one_out_baseline=True,
        val_period=10,
        val_at_start=False,
        max_val_samples=256,
        val_batch_size=256,
        seed=42,
        overlong_filtering=False,
        use_dynamic_sampling=False,
        dynamic_sampling_max_gen_batches=10,
        batch_multiplier=1,
    ),
    "grpo.reward_shaping": dict(
        enabled=False, overlong_buffer_length=128, overlong_buffer_penalty=1, max_response_length=512
    ),
    "grpo.reward_scaling": dict(enabled=False, source_min=0.0, source_max=1.0, target_min=0.0, target_max=1.0),
    "grpo.async_grpo": dict(enabled=False, max_trajectory_age_steps=1, in_flight_weight_updates=False),
    "loss_fn": dict(
        reference_policy_kl_penalty=0.01,
        reference_policy_kl_type="k3",
        ratio_clip_min=0.2,
        ratio_clip_max=0.2,
        ratio_clip_c=None,
        use_on_policy_kl_approximation=False,
        use_importance_sampling_correction=False,
        truncated_importance_sampling_type=None,
        truncated_importance_sampling_ratio=None,
        truncated_importance_sampling_ratio_min=None,
        sequence_level_importance_ratios=False,
        token_level_loss=True,
        disable_ppo_ratio=False,
        force_on_policy_ratio=False,
        use_cispo=False,
    ),
    "policy": dict(
        model_name="some/model",
        train_global_batch_size=512,
        train_micro_batch_size=4,
        generation_batch_size=32,
        logprob_batch_size=4,
        max_total_sequence_length=512,
        precision="bfloat16",
        make_sequence_length_divisible_by=None,
        max_grad_norm=1.0,
        optimizer=None,
        scheduler=None,
    ),
    "policy.tokenizer": dict(name="some/model", chat_template=None),
    "policy.dtensor_cfg": dict(
        enabled=False,
        cpu_offload=False,
        sequence_parallel=False,
        activation_checkpointing=False,
        tensor_parallel_size=1,
        context_parallel_size=1,
        custom_parallel_plan=None,
    ),
    "policy.megatron_cfg": dict(
        empty_unused_memory_level=0,
        activation_checkpointing=False,
        converter_type=None,
        tensor_model_parallel_size=1,
        expert_tensor_parallel_size=1,
        expert_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        context_parallel_size=1,
        pipeline_dtype="bfloat16",
        sequence_parallel=False,
        freeze_moe_router=True,
        moe_router_dtype="fp64",
        moe_router_load_balancing_type="none",
        moe_router_bias_update_rate=0.0,
        apply_rope_fusion=True,
    ),
    "policy.megatron_cfg.optimizer": dict(
        optimizer="adam",
        lr=5e-6,
        min_lr=5e-7,
        weight_decay=0.01,
        bf16=True,
        fp16=False,
        params_dtype="float32",
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_eps=1e-8,
        sgd_momentum=0.9,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=True,
        clip_grad=1.0,
    ),
    "policy.megatron_cfg.scheduler": dict(
        start_weight_decay=0.01,
        end_weight_decay=0.01,
        weight_decay_incr_style="constant",
        lr_decay_style="constant",
        lr_decay_iters=None,
        lr_warmup_iters=13,
        lr_warmup_init=5e-7,
    ),
    "policy.megatron_cfg.distributed_data_parallel_config": dict(
        grad_reduce_in_fp32=False,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        average_in_collective=True,
        use_custom_fsdp=False,
        data_parallel_sharding_strategy="optim_grads_params",
    ),
    "policy.sequence_packing": dict(
        enabled=True,
        train_mb_tokens=2048,
        logprob_mb_tokens=2048,
        algorithm="modified_first_fit_decreasing",
        sequence_length_round=64,
    ),
    "policy.dynamic_batching": dict(
        enabled=False, train_mb_tokens=2048, logprob_mb_tokens=2048, sequence_length_round=64
    ),
    "policy.generation": dict(
        backend="vllm",
        max_new_tokens=512,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        stop_token_ids=None,
        stop_strings=None,
        vllm_kwargs={},
    ),
    "policy.generation.vllm_cfg": dict(
        async_engine=True,
        precision="bfloat16",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        gpu_memory_utilization=0.6,
        max_model_len=512,
        enforce_eager=False,
    ),
    "policy.generation.colocated": dict(enabled=False),
    "policy.generation.colocated.resources": dict(gpus_per_node=None, num_nodes=None),
    "data": dict(
        max_input_seq_length=511, prompt_file=None, system_prompt_file=None, dataset_name="reasoning_gym/chain_sum"
    ),
    "checkpointing": dict(
        enabled=True,
        checkpoint_dir="runs/run/checkpoints",
        metric_name=None,
        higher_is_better=True,
        keep_top_k=3,
        save_period=10,
    ),
    "logger": dict(
        log_dir="runs/run/logs",
        num_val_samples_to_print=0,
        wandb_enabled=False,
        tensorboard_enabled=False,
        mlflow_enabled=False,
        wandb={},
        tensorboard={},
        mlflow={},
        monitor_gpus=False,
    ),
    "cluster": dict(gpus_per_node=1, num_nodes=1),
    "redis": dict(url=None),
    "staleness": dict(max_versions=0),
    "weights": dict(transport="auto", delta=False),
}


@pytest.fixture(scope="module")
def smallest() -> Config:
    return make()


@pytest.mark.parametrize("path", DEFAULTS)
def test_every_documented_name_has_its_documented_default(smallest: Config, path: str) -> None:
    block = attrgetter(path)(smallest)
    assert {name: getattr(block, name) for name in DEFAULTS[path]} == DEFAULTS[path]


def test_the_offline_algorithms_keep_their_names() -> None:
    names = {key.path for key in schema.walk(Config)}
    shared = {"max_num_epochs", "max_num_steps", "val_period"}
    weights = {"preference_loss_weight", "sft_loss_weight"}
    averages = {"preference_average_log_probs", "sft_average_log_probs"}
    assert {f"dpo.{name}" for name in shared | weights | averages | {"reference_policy_kl_penalty"}} <= names
    assert {f"sft.{name}" for name in shared} <= names


def test_every_key_and_every_block_says_what_it_is() -> None:
    assert [key.path for key in schema.walk(Config) if not (key.field.description or "").endswith(".")] == []
    blocks = {schema.block_at(Config, key.path.rpartition(".")[0]) for key in schema.walk(Config)}
    assert [block for block in blocks if block and not inspect.getdoc(block)] == []
