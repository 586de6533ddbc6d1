"""What reaches vLLM, and what may not be changed on the way."""

from __future__ import annotations

import pytest

from services.rollout.settings import FIXED, EngineSettings, engine_settings, set_cpu_environment
from trireme.config import ConfigError, from_tree

BASE = {
    "policy": {
        "model_name": "some/model",
        "max_total_sequence_length": 128,
        "precision": "float32",
        "megatron_cfg": {"enabled": True},
        "generation": {"max_new_tokens": 16},
    },
    "data": {"dataset_name": "reasoning_gym/chain_sum"},
    "grpo": {"seed": 5},
}


def settings(**kwargs: object) -> EngineSettings:
    tree = {**BASE, "policy": {**BASE["policy"], "generation": {"max_new_tokens": 16, "vllm_kwargs": kwargs}}}
    return engine_settings(from_tree(tree))


def test_vllm_kwargs_are_handed_on_and_training_needs_stay() -> None:
    """P-01 and P-06: log-probs of what was sampled, and no defaults out of the model folder."""
    args = settings(max_num_seqs=64, block_size=64).engine_args(cpu=True)
    assert (args["max_num_seqs"], args["block_size"]) == (64, 64)
    assert (args["logprobs_mode"], args["generation_config"]) == ("processed_logprobs", "vllm")
    assert (args["model"], args["dtype"], args["max_model_len"], args["seed"]) == ("some/model", "float32", 128, 5)
    assert args["enable_prefix_caching"] is True


def test_a_cpu_shares_small_blocks_and_prefills_whole_prompts() -> None:
    args = settings().engine_args(cpu=True)
    assert (args["block_size"], args["enable_chunked_prefill"]) == (32, False)
    assert args["max_num_batched_tokens"] >= args["max_model_len"]
    assert not {"block_size", "enable_chunked_prefill"} & settings().engine_args(cpu=False).keys()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        *((key, f"vllm_kwargs.{key} is set by the rollout service") for key in FIXED),
        ("dtype", "set policy.generation.vllm_cfg.precision instead"),
    ],
)
def test_what_would_bend_the_distribution_is_refused_by_key(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**{key: "auto"})


def test_the_environment_is_filled_in_but_never_overruled() -> None:
    environment = {"OMP_NUM_THREADS": "3"}
    set_cpu_environment({}, eager=True, environment=environment)
    assert environment["OMP_NUM_THREADS"] == "3" and int(environment["VLLM_CPU_KVCACHE_SPACE"]) > 0
    with_own_cache: dict[str, str] = {}
    set_cpu_environment({"kv_cache_memory_bytes": 1 << 28}, eager=False, environment=with_own_cache)
    assert "VLLM_CPU_KVCACHE_SPACE" not in with_own_cache
    assert environment["TORCH_COMPILE_DISABLE"] == "1" and "TORCH_COMPILE_DISABLE" not in with_own_cache
