"""What is wrong is said by full key, value and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.support import FILES, make, problems
from trireme.config import ConfigError, from_tree, load_config


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("gpro.seed", "grpo"),
        ("grpo.num_promts_per_step", "grpo.num_prompts_per_step"),
        ("grpo.async_grpo.enable", "grpo.async_grpo.enabled"),
        ("policy.megatron_cfg.optimizer.learning_rate", "learning_rate"),
        ("policy.lr", "policy.megatron_cfg.optimizer.lr"),
        ("env.math.num_worker", "env.math.num_workers"),
        ("max_new_tokens", "policy.generation.max_new_tokens"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(key: str, meant: str) -> None:
    (problem,) = problems(f"{key}=1")
    unknown = "gpro" if key.startswith("gpro") else key
    assert problem.startswith(f"unknown key {unknown}; ")
    assert meant in problem


def test_a_key_that_is_like_no_other_gets_the_list_of_its_block() -> None:
    (problem,) = problems("staleness.zzz=1")
    assert problem == "unknown key staleness.zzz; staleness has max_versions"


def test_all_unknown_keys_are_named_at_once() -> None:
    assert len(problems("grpo.sed=1", "loss_fn.foo=2", "bar=3")) == 3


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("grpo.num_prompts_per_step=many", ["grpo.num_prompts_per_step", "'many'", "whole number"]),
        ("grpo.num_prompts_per_step='8'", ["grpo.num_prompts_per_step", "'8'", "whole number"]),
        ("grpo.val_period=1.5", ["grpo.val_period", "1.5", "whole number"]),
        ("grpo.seed=true", ["grpo.seed", "true", "whole number"]),
        ("grpo.seed=-1", ["grpo.seed", "-1", "greater than or equal to 0"]),
        ("data.shuffle=1", ["data.shuffle", "1", "true or false"]),
        ("loss_fn.ratio_clip_min=.inf", ["loss_fn.ratio_clip_min", "inf", "finite"]),
        ("loss_fn.reference_policy_kl_type=k4", ["loss_fn.reference_policy_kl_type", "'k4'", "'k1', 'k2' or 'k3'"]),
        ("policy.sequence_packing.algorithm=first_fit_decreasin", ["did you mean 'first_fit_decreasing'?"]),
        ("policy.generation.stop_strings=[1]", ["policy.generation.stop_strings.0", "text"]),
        ("policy.generation.backend=hf", ["policy.generation.backend", "'hf'", "'vllm'"]),
        ("grpo=3", ["grpo", "3", "block of keys"]),
        ("env.math=3", ["env.math", "3", "block of keys"]),
        ("run.name=a/b", ["run.name", "'a/b'", "Name of the run"]),
        ("grpo.val_at_start=null", ["grpo.val_at_start", "null", "true or false"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(override: str, says: list[str]) -> None:
    (problem,) = problems(override)
    assert [part for part in says if part not in problem] == []


@pytest.mark.parametrize("value", ["0", "-1", "0.0"])
def test_temperature_without_randomness_is_refused(value: str) -> None:
    """P-04: log-probs at temperature 0 do not exist."""
    (problem,) = problems(f"policy.generation.temperature={value}")
    assert "policy.generation.temperature" in problem
    assert "greater than or equal to 0.01" in problem


def test_a_wrong_value_is_named_once_and_not_again_by_those_that_follow_it() -> None:
    (problem,) = problems("policy.max_total_sequence_length=-5")
    assert problem.startswith("policy.max_total_sequence_length: -5")


def test_a_required_key_is_named_with_its_meaning() -> None:
    with pytest.raises(ConfigError, match=r"policy\.model_name is required: Folder of the Hugging Face model"):
        from_tree(
            {"policy": {"megatron_cfg": {"enabled": True}, "tokenizer": {"name": "x"}}, "data": {"dataset_name": "d"}}
        )


def test_nothing_at_all_names_what_is_required() -> None:
    with pytest.raises(ConfigError) as caught:
        from_tree({})
    assert "policy.model_name is required" in str(caught.value)
    assert "data.dataset_name is required" in str(caught.value)


def test_a_reference_to_an_unknown_key_names_the_nearest() -> None:
    (problem,) = problems("run.dir=${run.nam}")
    assert problem.startswith("run.dir: ")
    assert "did you mean run.name?" in problem


@pytest.mark.parametrize("reference", ["${mul:grpo.sed,2}", "${mul:a}", "${nothing:1}", "${grpo.seed", "${run.name}"])
def test_a_reference_that_gives_no_value_is_refused_with_its_key(reference: str) -> None:
    found = problems(f"grpo.max_num_steps={reference}")
    assert found
    assert "grpo.max_num_steps" in found[0]


def test_a_password_is_not_in_the_message() -> None:
    (problem,) = problems("redis.url=http://user:secret@host")
    assert "secret" not in problem
    assert "redis.url" in problem


def test_values_do_not_change_once_loaded() -> None:
    with pytest.raises(ValueError, match="frozen"):
        make().grpo.seed = 3  # type: ignore[misc]


def test_a_list_where_a_block_stands_is_named_however_far_below_the_block_is(tmp_path: Path) -> None:
    """The file between says nothing of the block."""
    child = tmp_path / "child.yaml"
    child.write_text(f"defaults: {FILES / 'grpo_math_1B_megatron.yaml'}\nrun: {{name: x}}\n")
    with pytest.raises(ConfigError, match="grpo is a block of keys and cannot be a list"):
        load_config(child, ["grpo=[]"])
