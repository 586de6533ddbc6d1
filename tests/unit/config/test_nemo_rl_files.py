"""Files of NeMo-RL users load, mean the same, and are refused by name where they cannot."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.unit.config.support import FILES, SMALLEST, problems
from trireme.config import ConfigError, load_config, schema, unsupported
from trireme.config.legacy import FOREIGN, RENAMED, WITHOUT_EFFECT
from trireme.config.loader import load
from trireme.config.root import Config

MEGATRON_FILE = FILES / "grpo_math_1B_megatron.yaml"


def test_the_megatron_recipe_loads_and_means_the_same() -> None:
    config = load_config(MEGATRON_FILE)
    assert config.policy.megatron_cfg.enabled
    assert not config.policy.dtensor_cfg.enabled
    assert config.policy.optimizer is None
    assert (config.grpo.samples_per_step, config.policy.train_global_batch_size) == (512, 512)
    assert config.policy.sequence_packing.train_mb_tokens == 512 * 4
    assert config.policy.megatron_cfg.optimizer.clip_grad == 1.0
    assert config.policy.megatron_cfg.pipeline_dtype == "bfloat16"
    assert config.checkpointing.checkpoint_dir == "results/grpo_megatron"
    assert config.staleness.max_versions == 0


def test_what_means_nothing_here_is_reported_once_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trireme.config"):
        load_config(MEGATRON_FILE)
    ignored = [record.getMessage().partition(" is ignored")[0] for record in caplog.records]
    assert sorted(ignored) == [
        "checkpointing.checkpoint_must_save_by",
        "env.math.num_workers",
        "logger.gpu_monitoring.collection_interval",
        "logger.gpu_monitoring.flush_interval",
        "logger.monitor_gpus",
        "policy.dtensor_cfg._v2",
        "policy.generation.colocated.enabled",
        "policy.generation.vllm_cfg.async_engine",
        "policy.generation_batch_size",
        "policy.logprob_chunk_size",
        "policy.megatron_cfg.converter_type",
        "policy.megatron_cfg.distributed_data_parallel_config.average_in_collective",
        "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather",
        "policy.scheduler",
    ]


def test_the_dtensor_recipe_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"policy\.dtensor_cfg\.enabled=true is not yet supported; use false"):
        load_config(FILES / "grpo_math_1B.yaml")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("policy.generation.vllm_cfg.tensor_parallel_size=2", "policy.generation.vllm_cfg.tensor_parallel_size=2"),
        ("policy.megatron_cfg.peft={enabled: true, dim: 8}", "policy.megatron_cfg.peft"),
        ("grpo.adv_estimator.name=reinforce_plus_plus", "grpo.adv_estimator"),
        ("policy.generation.vllm_cfg.kv_cache_dtype=fp8", "policy.generation.vllm_cfg.kv_cache_dtype"),
        ("data.train.dataset_name=x", "data.train"),
    ],
)
def test_what_would_mean_something_is_refused_by_name(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match="not yet supported") as caught:
        load_config(MEGATRON_FILE, [override])
    assert named in str(caught.value)


def test_keys_of_later_versions_that_are_off_are_dropped_and_reported() -> None:
    overrides = [
        "policy.megatron_cfg.peft={enabled: false, dim: 8}",
        "grpo.adv_estimator.name=grpo",
        "policy.draft=null",
    ]
    loaded = load(MEGATRON_FILE, overrides)
    assert loaded.config == load(MEGATRON_FILE).config
    reported = {notice.partition(" is ignored")[0] for notice in loaded.notices}
    assert {"policy.megatron_cfg.peft", "grpo.adv_estimator", "policy.draft"} <= reported


def test_a_renamed_key_is_read_under_its_new_name_with_a_notice() -> None:
    loaded = load(MEGATRON_FILE, ["loss_fn.ratio_eps_max=0.28"])
    assert loaded.config.loss_fn.ratio_clip_max == 0.28
    assert "loss_fn.ratio_eps_max is now called loss_fn.ratio_clip_max" in loaded.notices


def test_old_and_new_name_in_one_file_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ratio_eps_max is the old name of loss_fn\.ratio_clip_max"):
        load(MEGATRON_FILE, ["loss_fn.ratio_eps_max=0.28", "loss_fn.ratio_clip_max=0.2"])


def test_the_tables_speak_of_keys_that_exist_or_do_not() -> None:
    for pattern in (*WITHOUT_EFFECT, *RENAMED.values(), *(row.key for row in unsupported.TABLE)):
        schema.find(Config, pattern)
    for path in (*FOREIGN, *RENAMED):
        with pytest.raises(KeyError):
            schema.find(Config, path)


@pytest.mark.parametrize(
    "override",
    [
        "policy.dtensor_cfg.enabled=true",
        "policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp=true",
        "policy.precision=float16",
        "policy.generation.vllm_cfg.tensor_parallel_size=2",
        "policy.generation.vllm_cfg.pipeline_parallel_size=2",
        "grpo.max_rollout_turns=2",
        "cluster.num_nodes=2",
        "dpo.max_num_steps=1",
        "sft={}",
        "security.tls=true",
        "security.tokens=[hidden]",
        "weights.delta=true",
    ],
)
def test_what_is_not_there_yet_is_refused_by_its_key(override: str) -> None:
    key = override.partition("=")[0].removesuffix(".max_num_steps")
    refusals = [problem for problem in problems(override) if "is not yet supported" in problem]
    assert any(problem.startswith(key) for problem in refusals)
    assert "hidden" not in str(refusals)


def test_a_recipe_with_an_error_is_named(tmp_path: Path) -> None:
    path = tmp_path / "child.yaml"
    path.write_text(f"defaults: {MEGATRON_FILE}\ngrpo: {{sed: 1}}\n")
    with pytest.raises(ConfigError, match=r"child\.yaml: unknown key grpo\.sed"):
        load_config(path)


def test_the_smallest_configuration_reports_nothing(tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "smallest.yaml"
    path.write_text(yaml.safe_dump(SMALLEST))
    assert load(path).notices == ()


@pytest.mark.parametrize(
    "override",
    ["moe_router_load_balancing_type=aux_loss", "moe_aux_loss_coeff=0.01", "moe_router_bias_update_rate=0.1"],
)
def test_balancing_losses_are_refused(override: str) -> None:
    """M-10: one whose scale depended on the layout would change the policy in silence."""
    key, _, value = override.partition("=")
    (problem,) = [text for text in problems(f"policy.megatron_cfg.{override}") if "is not yet supported" in text]
    assert f"policy.megatron_cfg.{key}={value}" in problem
