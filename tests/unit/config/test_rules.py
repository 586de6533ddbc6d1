"""Each rule across keys is broken once, by name; its remedy is accepted."""

from __future__ import annotations

import pytest

from tests.unit.config.support import make, problems
from trireme.config import rules, unsupported

ASYNC = "grpo.async_grpo.enabled=true"
CORRECTION = "loss_fn.use_importance_sampling_correction=true"
TIS = "loss_fn.truncated_importance_sampling_type=tis"
UPPER = "loss_fn.truncated_importance_sampling_ratio"
LOWER = "loss_fn.truncated_importance_sampling_ratio_min"
MEGATRON = "policy.megatron_cfg"
TP2 = f"{MEGATRON}.tensor_model_parallel_size=2"
CP2 = f"{MEGATRON}.context_parallel_size=2"
PP2 = f"{MEGATRON}.pipeline_model_parallel_size=2"

# (rule, what breaks it, every key that the message must name, what mends it)
CASES = [
    (
        "one-backend",
        [f"{MEGATRON}.enabled=false"],
        [f"{MEGATRON}.enabled", "policy.dtensor_cfg.enabled"],
        ["policy.dtensor_cfg.enabled=true"],
    ),
    (
        "one-backend",
        ["policy.dtensor_cfg.enabled=true"],
        [f"{MEGATRON}.enabled", "policy.dtensor_cfg.enabled"],
        ["policy.dtensor_cfg.enabled=false"],
    ),
    (
        "packing-or-dynamic-batching",
        ["policy.dynamic_batching.enabled=true"],
        ["policy.sequence_packing.enabled", "policy.dynamic_batching.enabled"],
        ["policy.sequence_packing.enabled=false"],
    ),
    (
        "packing-or-dynamic-batching",
        ["policy.dynamic_batching.enabled=true", "policy.sequence_packing.enabled=false", PP2, "trainer.nproc=2"],
        ["policy.dynamic_batching.enabled", "pipeline_model_parallel_size"],
        [f"{MEGATRON}.pipeline_model_parallel_size=1"],
    ),
    (
        "context-parallel-needs-packing",
        ["policy.sequence_packing.enabled=false", CP2, "trainer.nproc=2"],
        ["context_parallel_size", "policy.sequence_packing.enabled"],
        ["policy.sequence_packing.enabled=true"],
    ),
    ("world-size", ["trainer.nproc=3", TP2], ["trainer.nproc", "tensor_model_parallel_size", "4"], ["trainer.nproc=4"]),
    (
        "expert-world-size",
        ["trainer.nproc=3", f"{MEGATRON}.expert_model_parallel_size=2"],
        ["trainer.nproc", "expert_model_parallel_size"],
        ["trainer.nproc=4"],
    ),
    (
        "sequence-parallel-needs-tensor-parallel",
        [f"{MEGATRON}.sequence_parallel=true"],
        ["sequence_parallel", "tensor_model_parallel_size"],
        [TP2, "trainer.nproc=2"],
    ),
    (
        "sequence-length-multiple",
        [
            *(TP2, CP2, "trainer.nproc=4", f"{MEGATRON}.sequence_parallel=true"),
            "policy.make_sequence_length_divisible_by=6",
        ],
        ["policy.make_sequence_length_divisible_by", "context_parallel_size", "tensor_model_parallel_size", ": 8"],
        ["policy.make_sequence_length_divisible_by=null"],
    ),
    (
        "pipeline-stage-layers",
        [f"{MEGATRON}.num_layers_in_last_pipeline_stage=2"],
        ["num_layers_in_last_pipeline_stage", "pipeline_model_parallel_size"],
        [PP2, "trainer.nproc=2"],
    ),
    (
        "pipeline-stage-layers",
        [f"{MEGATRON}.virtual_pipeline_model_parallel_size=2"],
        ["virtual_pipeline_model_parallel_size", "pipeline_model_parallel_size"],
        [PP2, "trainer.nproc=2"],
    ),
    (
        "shared-prefix-needs-whole-sequences",
        ["trainer.shared_prefix=true", CP2, "trainer.nproc=2"],
        ["trainer.shared_prefix", "context_parallel_size"],
        ["trainer.shared_prefix=auto"],
    ),
    (
        "force-on-policy-ratio",
        ["loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=256"],
        ["loss_fn.force_on_policy_ratio", "policy.train_global_batch_size=512", "grpo.num_prompts_per_step"],
        ["policy.train_global_batch_size=512"],
    ),
    (
        "sequence-level-ratio-reduction",
        ["loss_fn.sequence_level_importance_ratios=true"],
        ["loss_fn.sequence_level_importance_ratios", "loss_fn.token_level_loss=false"],
        ["loss_fn.token_level_loss=false"],
    ),
    ("truncated-importance-sampling", [TIS, f"{UPPER}=2"], ["truncated_importance_sampling_type"], [CORRECTION]),
    ("truncated-importance-sampling", [TIS, CORRECTION], [f"{UPPER}=2.0"], [f"{UPPER}=2"]),
    (
        "truncated-importance-sampling",
        ["loss_fn.truncated_importance_sampling_type=icepop", CORRECTION, f"{UPPER}=5"],
        [f"{LOWER}=0.5"],
        [f"{LOWER}=0.5"],
    ),
    (
        "truncated-importance-sampling",
        ["loss_fn.truncated_importance_sampling_type=seq-mask-tis", CORRECTION, f"{UPPER}=1", f"{LOWER}=1.1"],
        [UPPER, LOWER],
        [f"{UPPER}=1.2"],
    ),
    ("truncated-importance-sampling", [CORRECTION, f"{UPPER}=2"], [UPPER, "type=tis"], [TIS]),
    (
        "cispo-excludes",
        ["loss_fn.use_cispo=true", "loss_fn.ratio_clip_c=3"],
        ["loss_fn.use_cispo", "loss_fn.ratio_clip_c"],
        ["loss_fn.ratio_clip_c=null"],
    ),
    (
        "cispo-excludes",
        ["loss_fn.use_cispo=true", "loss_fn.disable_ppo_ratio=true"],
        ["loss_fn.use_cispo", "loss_fn.disable_ppo_ratio"],
        ["loss_fn.disable_ppo_ratio=false"],
    ),
    (
        "cispo-excludes",
        [
            "loss_fn.use_cispo=true",
            "loss_fn.sequence_level_importance_ratios=true",
            "loss_fn.token_level_loss=false",
        ],
        ["loss_fn.use_cispo", "loss_fn.sequence_level_importance_ratios"],
        ["loss_fn.sequence_level_importance_ratios=false"],
    ),
    ("dual-clip-bound", ["loss_fn.ratio_clip_c=1.0"], ["loss_fn.ratio_clip_c", "3.0"], ["loss_fn.ratio_clip_c=3.0"]),
    ("async-anchor", [ASYNC], ["grpo.async_grpo.enabled", CORRECTION], [CORRECTION]),
    (
        "async-separate-rollout",
        [ASYNC, CORRECTION, "policy.generation.colocated.enabled=true"],
        ["grpo.async_grpo.enabled", "policy.generation.colocated.enabled=false"],
        ["policy.generation.colocated.enabled=false"],
    ),
    (
        "global-batch-divides-step",
        ["policy.train_global_batch_size=250"],
        ["policy.train_global_batch_size=512", "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"],
        ["policy.train_global_batch_size=256"],
    ),
    (
        "sampling-filter",
        ["policy.generation.top_p=0.9"],
        ["policy.generation.top_p=1.0"],
        ["policy.generation.top_p=1"],
    ),
    ("sampling-filter", ["policy.generation.top_k=1"], ["policy.generation.top_k"], ["policy.generation.top_k=null"]),
    (
        "stop-strings-not-empty",
        ["policy.generation.stop_strings=['']"],
        ["policy.generation.stop_strings"],
        ["policy.generation.stop_strings=[a]"],
    ),
    (
        "staleness-bound",
        ["staleness.max_versions=2"],
        ["staleness.max_versions", "grpo.async_grpo"],
        [ASYNC, CORRECTION, "grpo.async_grpo.max_trajectory_age_steps=2"],
    ),
    (
        "prompt-and-response-fit-context",
        ["data.max_input_seq_length=400", "policy.generation.max_new_tokens=200"],
        ["data.max_input_seq_length", "policy.generation.max_new_tokens=112", "max_model_len=600"],
        ["policy.generation.max_new_tokens=112"],
    ),
    (
        "prompt-and-response-fit-context",
        ["policy.generation.max_new_tokens=600"],
        ["policy.generation.max_new_tokens", "max_model_len"],
        ["policy.generation.max_new_tokens=512"],
    ),
    (
        "context-fits-training",
        ["policy.generation.vllm_cfg.max_model_len=1024"],
        ["max_model_len", "policy.max_total_sequence_length=1024"],
        ["policy.max_total_sequence_length=1024"],
    ),
    (
        "micro-batch-holds-a-sequence",
        ["policy.sequence_packing.train_mb_tokens=500"],
        ["policy.sequence_packing.train_mb_tokens", "policy.max_total_sequence_length"],
        ["policy.sequence_packing.train_mb_tokens=512"],
    ),
    (
        "micro-batch-holds-a-sequence",
        [
            "trainer.nproc=3",
            f"{MEGATRON}.context_parallel_size=3",
            "policy.max_total_sequence_length=515",
            "policy.sequence_packing.train_mb_tokens=515",
            "policy.sequence_packing.logprob_mb_tokens=516",
        ],
        ["policy.sequence_packing.train_mb_tokens", "context_parallel_size=3", "at least 516"],
        ["policy.sequence_packing.train_mb_tokens=516"],
    ),
    (
        "overlong-buffer",
        ["grpo.reward_shaping={enabled: true, overlong_buffer_length: 600}"],
        ["overlong_buffer_length", "max_response_length"],
        ["grpo.reward_shaping.overlong_buffer_length=500"],
    ),
    (
        "learning-rates-in-order",
        [f"{MEGATRON}.optimizer.lr=1e-7"],
        ["lr_warmup_init", "optimizer.lr"],
        [f"{MEGATRON}.scheduler.lr_warmup_iters=0"],
    ),
    (
        "learning-rates-in-order",
        [f"{MEGATRON}.optimizer.min_lr=1e-3", f"{MEGATRON}.scheduler.lr_decay_style=linear"],
        ["min_lr", "optimizer.lr"],
        [f"{MEGATRON}.optimizer.lr=1e-2"],
    ),
    (
        "warm-up-before-decay",
        [f"{MEGATRON}.scheduler.lr_decay_style=cosine", f"{MEGATRON}.scheduler.lr_decay_iters=13"],
        ["lr_warmup_iters=12", "lr_decay_iters"],
        [f"{MEGATRON}.scheduler.lr_warmup_iters=12"],
    ),
    (
        "warm-up-before-decay",
        [f"{MEGATRON}.scheduler.lr_decay_style=cosine", "grpo.max_num_steps=13"],
        ["lr_warmup_iters=12", "grpo.max_num_steps"],
        [f"{MEGATRON}.scheduler.lr_warmup_iters=12"],
    ),
    (
        "optimizer-precision",
        ["policy.precision=float32", f"{MEGATRON}.optimizer.bf16=true"],
        ["optimizer.bf16=false", "policy.precision"],
        [f"{MEGATRON}.optimizer.bf16=false"],
    ),
    (
        "pipeline-dtype",
        [f"{MEGATRON}.pipeline_dtype=float32", "policy.precision=bfloat16"],
        ["pipeline_dtype=bfloat16", "policy.precision"],
        [f"{MEGATRON}.pipeline_dtype=bfloat16"],
    ),
    (
        "checkpoint-metric",
        ["checkpointing.metric_name=accuracy"],
        ["checkpointing.metric_name", "validation/accuracy"],
        ["checkpointing.metric_name=val:accuracy"],
    ),
    (
        "reward-scaling-interval",
        ["grpo.reward_scaling={enabled: true, source_min: 1, source_max: 1}"],
        ["source_min", "source_max"],
        ["grpo.reward_scaling.source_max=2"],
    ),
    (
        "batch-multiplier",
        ["grpo.batch_multiplier=2"],
        ["grpo.batch_multiplier", "use_dynamic_sampling"],
        ["grpo.use_dynamic_sampling=true"],
    ),
    (
        "one-system-prompt",
        ["data.system_prompt=a", "data.system_prompt_file=b"],
        ["data.system_prompt", "data.system_prompt_file"],
        ["data.system_prompt=null"],
    ),
    (
        "vllm-kwargs",
        ["policy.generation.vllm_kwargs.seed=3"],
        ["policy.generation.vllm_kwargs.seed", "grpo.seed"],
        ["policy.generation.vllm_kwargs.seed=null"],
    ),
]


@pytest.fixture(autouse=True)
def _everything_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules about features that are not there yet are rules all the same."""
    monkeypatch.setattr(unsupported, "TABLE", ())


@pytest.mark.parametrize(("name", "broken", "named", "remedy"), CASES)
def test_a_broken_rule_is_named_with_its_keys_and_its_remedy_mends_it(
    name: str, broken: list[str], named: list[str], remedy: list[str]
) -> None:
    """P-05, P-16 among them: filters that only the engine knows; stale samples without an anchor."""
    (problem,) = problems(*broken)
    assert problem.startswith(f"rule {name}: ")
    assert [key for key in named if key not in problem] == []
    assert problems(*broken, *remedy) == []


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in rules.RULES} == {case[0] for case in CASES}
    assert [rule.name for rule in rules.RULES if not rule.summary] == []


def test_broken_rules_are_reported_together() -> None:
    found = problems(ASYNC, "policy.generation.top_p=0.9", "loss_fn.ratio_clip_c=0.5")
    assert [problem.split(":")[0] for problem in found] == [
        "rule dual-clip-bound",
        "rule async-anchor",
        "rule sampling-filter",
    ]


def test_context_and_tensor_parallel_multiply() -> None:
    """The multiple of a sequence's length is (2·CP if CP>1)·(TP if sequence-parallel)."""
    layouts = {
        (1, 1, False): 1,
        (3, 1, False): 1,
        (3, 1, True): 3,
        (1, 2, False): 4,
        (3, 2, False): 4,
        (3, 2, True): 12,
    }
    for (tensor, context, parallel), multiple in layouts.items():
        megatron = make(
            f"{MEGATRON}.tensor_model_parallel_size={tensor}",
            f"{MEGATRON}.context_parallel_size={context}",
            f"{MEGATRON}.sequence_parallel={str(parallel).lower()}",
            f"trainer.nproc={tensor * context}",
        ).policy.megatron_cfg
        assert rules.layout.sequence_length_multiple(megatron) == multiple


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss_fn.use_cispo=true"],
        ["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"],
        ["loss_fn.ratio_clip_c=3.0"],
        [CORRECTION, TIS, f"{UPPER}=2.0"],
        [CORRECTION, "loss_fn.truncated_importance_sampling_type=icepop", f"{UPPER}=5", f"{LOWER}=0.5"],
        [ASYNC, CORRECTION, "grpo.async_grpo.in_flight_weight_updates=true"],
        ["grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=2"],
        ["grpo.overlong_filtering=true", "grpo.reward_shaping.enabled=true", "grpo.reward_scaling.enabled=true"],
        ["policy.sequence_packing.algorithm=concatenative"],
        ["policy.sequence_packing.algorithm=first_fit_shuffle"],
        ["policy.sequence_packing.algorithm=first_fit_decreasing"],
    ],
)
def test_what_is_supported_is_accepted(monkeypatch: pytest.MonkeyPatch, overrides: list[str]) -> None:
    monkeypatch.undo()
    assert problems(*overrides) == []


def test_metrics_have_nemo_rls_names_too() -> None:
    names = {"val_reward": "validation/accuracy", "val:accuracy": "validation/accuracy", "train:reward": "train/reward"}
    for given, recorded in (names | {"train/loss": "train/loss"}).items():
        assert make(f"checkpointing.metric_name={given}").checkpointing.ranked_by == recorded
    assert make().checkpointing.ranked_by is None
