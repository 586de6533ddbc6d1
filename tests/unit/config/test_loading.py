"""Files with parents, references and overrides become one configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.support import make
from trireme.config import ConfigError, hardware, load_config

BASE = """
policy:
  model_name: some/model
  megatron_cfg: {enabled: true}
data: {dataset_name: reasoning_gym/chain_sum}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_lies_on_top_of_its_parents_and_the_last_parent_on_the_first(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", BASE + "grpo: {seed: 1, val_period: 1, max_num_steps: 1}\n")
    write(tmp_path, "more/second.yaml", "defaults: ../base.yaml\ngrpo: {seed: 2, val_period: 2}\n")
    child = write(tmp_path, "child.yaml", "defaults: [base.yaml, more/second.yaml, _self_]\ngrpo: {seed: 3}\n")
    grpo = load_config(child).grpo
    assert (grpo.seed, grpo.val_period, grpo.max_num_steps) == (3, 2, 1)


def test_a_reference_of_a_parent_follows_the_value_of_the_child(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", BASE + "logger: {log_dir: '${run.name}-logs'}\n")
    child = write(tmp_path, "child.yaml", "defaults: base.yaml\nrun: {name: mine}\n")
    assert load_config(child).logger.log_dir == "mine-logs"


def test_parents_in_a_circle_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "defaults: b.yaml\n")
    path = write(tmp_path, "b.yaml", "defaults: a.yaml\n")
    with pytest.raises(ConfigError, match=r"circle.*b\.yaml.*a\.yaml.*b\.yaml"):
        load_config(path)


def test_a_missing_parent_is_named_with_the_file_that_names_it(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "defaults: nowhere.yaml\n")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml, named in `defaults` of .*a\.yaml"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- 1\n", "block of keys"),
        ("grpo: [1\n", "line"),
        ("grpo: {seed: 1}\ngrpo: {seed: 2}\n", "duplicate key"),
        ("defaults: 3\n", "`defaults` is a file name"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, "bad.yaml", text)
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(path)
    assert "bad.yaml" in str(caught.value)


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_overrides_win_and_may_carry_a_plus(tmp_path: Path, plus: str) -> None:
    path = write(tmp_path, "run.yaml", BASE + "grpo: {seed: 1}\n")
    assert load_config(path, [f"{plus}grpo.seed=7"]).grpo.seed == 7


def test_override_values_are_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, "run.yaml", BASE)
    config = load_config(
        path,
        [
            "policy.generation.stop_token_ids=[1,2]",
            "checkpointing.keep_top_k=null",
            "data.shuffle=false",
            "data.system_prompt=a=b",
            "data.dataset.min_terms=2",
        ],
    )
    assert config.policy.generation.stop_token_ids == [1, 2]
    assert config.checkpointing.keep_top_k is None
    assert config.data.shuffle is False
    assert config.data.system_prompt == "a=b"
    assert config.data.dataset == {"min_terms": 2}


@pytest.mark.parametrize("item", ["grpo.seed", "=3", "~grpo.seed=1"])
def test_an_override_without_key_or_value_is_refused(tmp_path: Path, item: str) -> None:
    with pytest.raises(ConfigError, match=r"key=value.*" + item):
        load_config(write(tmp_path, "run.yaml", BASE), [item])


def test_numbers_without_a_dot_are_numbers(tmp_path: Path) -> None:
    text = BASE.replace("{enabled: true}", "{enabled: true, optimizer: {lr: 5e-6, min_lr: 1E-7}}")
    optimizer = load_config(write(tmp_path, "run.yaml", text)).policy.megatron_cfg.optimizer
    assert (optimizer.lr, optimizer.min_lr) == (5e-6, 1e-7)


def test_a_whole_number_is_a_number_too() -> None:
    """P-04: temperature 1 is temperature 1.0."""
    temperature = make("policy.generation.temperature=1").policy.generation.temperature
    assert temperature == 1.0
    assert isinstance(temperature, float)


@pytest.mark.parametrize(
    "product",
    ["${mul:${policy.logprob_batch_size},3}", "${mul:policy.logprob_batch_size,3}", "${mul:4, 3}"],
)
def test_mul_multiplies_values_and_keys(product: str) -> None:
    assert make(f"policy.train_micro_batch_size={product}").policy.train_micro_batch_size == 12


def test_defaults_follow_the_keys_that_they_refer_to() -> None:
    config = make(
        "policy.max_total_sequence_length=100",
        "policy.train_micro_batch_size=3",
        "policy.precision=float32",
        "cluster.gpus_per_node=2",
        "run.name=x",
        "grpo.num_prompts_per_step=4",
    )
    assert config.policy.sequence_packing.train_mb_tokens == 300
    assert config.policy.generation.max_new_tokens == config.policy.generation.vllm_cfg.max_model_len == 100
    assert config.policy.generation.vllm_cfg.precision == config.policy.megatron_cfg.pipeline_dtype == "float32"
    assert config.policy.megatron_cfg.optimizer.bf16 is False
    assert config.policy.train_global_batch_size == 64
    assert config.world_size == config.data_parallel_size == 2
    assert config.run.dir == "runs/x"
    assert config.checkpointing.checkpoint_dir == "runs/x/checkpoints"


def test_null_for_a_key_that_follows_another_means_that_it_follows() -> None:
    assert make("policy.tokenizer.name=null", "staleness.max_versions=null", "grpo=null") == make()


def test_the_staleness_bound_follows_the_schedule() -> None:
    asynchronous = ("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")
    assert make().staleness.max_versions == 0
    assert make(*asynchronous, "grpo.async_grpo.max_trajectory_age_steps=4").staleness.max_versions == 4


@pytest.mark.parametrize(
    ("overrides", "prompt"),
    [
        ([], 511),
        (["policy.generation.max_new_tokens=100"], 412),
        (["policy.generation.max_new_tokens=100", "data.max_input_seq_length=512"], 412),
        (["data.max_input_seq_length=50"], 50),
        (["policy.generation.vllm_cfg.max_model_len=64", "policy.generation.max_new_tokens=16"], 48),
    ],
)
def test_a_prompt_as_long_as_the_context_leaves_room_for_the_response(overrides: list[str], prompt: int) -> None:
    assert make(*overrides).data.max_input_seq_length == prompt


def test_the_environment_names_redis_unless_an_override_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "run.yaml", BASE + "redis: {url: 'redis://file:1'}\n")
    assert load_config(path).redis.url == "redis://file:1"
    monkeypatch.setenv("TRIREME_REDIS_URL", "redis://:p${x@environment:2")
    assert load_config(path).redis.url == "redis://:p${x@environment:2"
    assert load_config(path, ["redis.url=redis://override:3"]).redis.url == "redis://override:3"


@pytest.mark.parametrize(
    ("flags", "device", "visible", "precision"),
    [
        ("fpu avx2 avx512_bf16", False, None, "bfloat16"),
        ("fpu amx_bf16", False, None, "bfloat16"),
        ("fpu avx2 avx512f", False, None, "float32"),
        ("fpu avx2", True, None, "bfloat16"),
        ("fpu avx2", True, "", "float32"),
        ("fpu avx2", True, "-1", "float32"),
        ("fpu avx2", True, "0", "bfloat16"),
    ],
)
def test_native_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, device: bool, visible: str | None, precision: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cpuinfo = write(tmp_path, "cpuinfo", f"processor\t: 0\nflags\t\t: {flags}\n")
    write(tmp_path, "dev/nvidia0" if device else "dev/null", "")
    assert hardware.native_precision(cpuinfo, tmp_path / "dev") == precision


@pytest.mark.parametrize("native", ["bfloat16", "float32"])
def test_auto_precision_is_settled_when_loaded(monkeypatch: pytest.MonkeyPatch, native: str) -> None:
    monkeypatch.setattr(hardware, "native_precision", lambda: native)
    policy = make("policy.precision=auto").policy
    assert policy.precision == policy.generation.vllm_cfg.precision == policy.megatron_cfg.pipeline_dtype == native
    assert policy.megatron_cfg.optimizer.bf16 is (native == "bfloat16")
