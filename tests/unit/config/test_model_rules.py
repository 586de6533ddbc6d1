"""A configuration against the model that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.support import NO_TENSORS, make
from trireme.config import Config, ConfigError, unsupported
from trireme.config.model_rules import check_model, check_model_folder, find_model, padded_vocab_size

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}


def tensor_parallel(size: int, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(unsupported, "TABLE", ())
    return make(f"policy.megatron_cfg.tensor_model_parallel_size={size}", f"trainer.nproc={size}")


def refusal(config: Config, hf_config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model(config, hf_config)
    return str(caught.value)


def test_a_fitting_model_is_accepted() -> None:
    check_model(make(), SMOLLM2)


def test_another_architecture_is_refused_with_those_that_are_supported() -> None:
    text = refusal(make(), SMOLLM2 | {"architectures": ["GPT2LMHeadModel"]})
    assert "policy.model_name" in text
    assert "GPT2LMHeadModel" in text
    assert "LlamaForCausalLM" in text


def test_a_model_without_an_architecture_is_refused() -> None:
    assert "none (model_type bert)" in refusal(make(), {"model_type": "bert"})


@pytest.mark.parametrize("size", [None, "576", 0, True])
def test_a_config_without_a_size_is_refused_by_its_name(size: object) -> None:
    assert "hidden_size" in refusal(make(), SMOLLM2 | {"hidden_size": size})


@pytest.mark.parametrize("size", [1, 3])
def test_tensor_parallel_sizes_that_share_the_heads(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    check_model(tensor_parallel(size, monkeypatch), SMOLLM2)


@pytest.mark.parametrize(("size", "nearest"), [(2, "1"), (4, "3"), (9, "3")])
def test_tensor_parallel_sizes_that_do_not(monkeypatch: pytest.MonkeyPatch, size: int, nearest: str) -> None:
    text = refusal(tensor_parallel(size, monkeypatch), SMOLLM2)
    assert "rule attention-heads" in text
    assert f": tensor_model_parallel_size={nearest} (possible: [1, 3])" in text


def test_a_width_that_does_not_divide_rules_a_size_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """W-13. SmolLM2's heads divide by nine, but neither its MLP nor, with three KV heads, its projection does."""
    nine = tensor_parallel(9, monkeypatch)
    for width, head in ((1536, 72), (1530, 64)):
        text = refusal(nine, SMOLLM2 | {"intermediate_size": width, "head_dim": head})
        assert ": tensor_model_parallel_size=3 (possible: [1, 3])" in text
    check_model(nine, SMOLLM2 | {"intermediate_size": 1530, "head_dim": 72})


@pytest.mark.parametrize(
    ("stages", "first", "last", "virtual", "fits"),
    [
        (2, None, None, None, True),
        (4, None, None, None, False),
        (4, 3, 3, None, True),
        (4, 3, None, None, True),
        (2, 10, 20, None, True),
        (2, 10, 10, None, False),
        (5, None, None, 3, True),
        (5, None, None, 4, False),
    ],
)
def test_layers_are_dealt_to_stages(
    stages: int, first: int | None, last: int | None, virtual: int | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = "policy.megatron_cfg"
    given = {
        "pipeline_model_parallel_size": stages,
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
        "virtual_pipeline_model_parallel_size": virtual,
    }
    config = make(*(f"{block}.{key}={value}" for key, value in given.items() if value), f"trainer.nproc={stages}")
    if fits:
        check_model(config, SMOLLM2)
    else:
        text = refusal(config, SMOLLM2)
        assert "rule pipeline-stages: 30 layers do not divide" in text and f"={stages} stages" in text
        follow(text, stages, virtual)


def follow(text: str, stages: int, virtual: int | None) -> None:
    """What a refusal proposes for as many stages is accepted."""
    proposed = re.findall(r"(?:num_layers_in|virtual_pipeline)_\w+=\w+", text)
    if virtual:
        proposed.insert(0, f"virtual_pipeline_model_parallel_size={virtual}")
    proposed.append(f"pipeline_model_parallel_size={stages}")
    check_model(make(f"trainer.nproc={stages}", *(f"policy.megatron_cfg.{each}" for each in proposed)), SMOLLM2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"architectures": None},
            "architecture none (model_type None) is not supported; supported are",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights cannot be trained"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported is silu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not supported"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type='longrope' is not supported"),
        ({"architectures": ["MixtralForCausalLM"], "sliding_window": 4096}, "unset sliding_window"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "unset sliding_window"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": True}, "attention_bias=true"),
        ({"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "silu"}, "supported is gelu_pytorch_tanh"),
        ({"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"architectures": ["Gemma3ForCausalLM"], "layer_types": ["sliding_attention"]}, "no full_attention"),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "x"},
                },
            },
            "rope_type='x'",
        ),
    ],
)
def test_what_a_model_has_and_training_has_not_is_refused_before_anything_starts(
    change: dict[str, Any], says: str
) -> None:
    assert says in refusal(make(), SMOLLM2 | change)


def test_what_is_written_but_unused_is_not_refused() -> None:
    check_model(make(), SMOLLM2 | {"rope_scaling": None, "hidden_act": "silu", "quantization_config": None})
    check_model(make(), SMOLLM2 | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32768})
    check_model(make(), SMOLLM2 | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}})


def test_heads_that_divide_while_kv_heads_neither_divide_nor_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tensor_parallel(4, monkeypatch)
    assert "rule attention-heads" in refusal(config, SMOLLM2 | {"num_attention_heads": 12, "num_key_value_heads": 6})


def test_a_context_longer_than_the_model_has_positions_for() -> None:
    text = refusal(make("policy.max_total_sequence_length=9000"), SMOLLM2)
    assert "policy.generation.vllm_cfg.max_model_len (9000)" in text
    assert "at most 8192" in text


def test_stop_tokens_outside_of_the_vocabulary() -> None:
    text = refusal(make("policy.generation.stop_token_ids=[2,49152]"), SMOLLM2)
    assert "policy.generation.stop_token_ids [49152]" in text


def test_experts_are_divided_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported, "TABLE", ())
    config = make("policy.megatron_cfg.expert_model_parallel_size=3", "trainer.nproc=3")
    assert "does not divide the model's 8 experts: expert_model_parallel_size=2" in refusal(
        config, SMOLLM2 | {"num_local_experts": 8}
    )
    assert "has no experts" in refusal(config, SMOLLM2)
    text = refusal(make("policy.megatron_cfg.expert_tensor_parallel_size=2"), SMOLLM2)
    assert "expert_tensor_parallel_size is 2, but the model has no experts: expert_tensor_parallel_size=1" in text
    check_model(config, SMOLLM2 | {"num_local_experts": 6})


@pytest.mark.parametrize(
    ("expert_tensor", "expert", "width", "says"),
    [(1, 1, 66, "they must agree"), (3, 1, 66, ""), (2, 3, 63, "does not divide the 63 columns of an expert: 1")],
)
def test_the_width_of_experts_is_divided_evenly(
    expert_tensor: int, expert: int, width: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M-10's kin: without expert parallelism, Megatron would not add up the gradients of ranks that share no expert."""
    monkeypatch.setattr(unsupported, "TABLE", ())
    block = "policy.megatron_cfg"
    config = make(
        f"{block}.tensor_model_parallel_size=3",
        f"{block}.sequence_parallel=true",
        f"{block}.expert_tensor_parallel_size={expert_tensor}",
        f"{block}.expert_model_parallel_size={expert}",
        "trainer.nproc=6",
    )
    hf_config = SMOLLM2 | {"num_experts": 6, "moe_intermediate_size": width}
    if says:
        assert says in refusal(config, hf_config)
    else:
        check_model(config, hf_config)


def test_experts_with_tensor_parallelism_need_sequence_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "sequence_parallel=true" in refusal(tensor_parallel(3, monkeypatch), SMOLLM2 | {"num_experts": 3})


@pytest.mark.parametrize(("size", "rows"), [(1, 50257), (2, 50258), (8, 50264)])
def test_the_vocabulary_is_padded_to_the_ranks(size: int, rows: int) -> None:
    """W-11: to the next multiple, not by a multiple."""
    assert padded_vocab_size(50257, size) == rows


def model_folder(path: Path, config: str | None = None, weights: bool = True) -> Path:
    path.mkdir(parents=True)
    if config is not None:
        (path / "config.json").write_text(config)
    if weights:
        (path / "model.safetensors").write_bytes(NO_TENSORS)
    (path / "tokenizer.json").touch()
    return path


def test_a_model_folder_is_read(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", json.dumps(SMOLLM2))
    assert check_model_folder(make(f"policy.model_name={folder}")) == SMOLLM2


def test_a_folder_without_a_tokenizer_is_refused_by_its_key(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", json.dumps(SMOLLM2))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.name: .* has no tokenizer"):
        check_model_folder(make(f"policy.model_name={folder}"))
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.name: no folder /nosuch"):
        check_model_folder(make(f"policy.model_name={folder}", "policy.tokenizer.name=/nosuch"))


def test_a_data_file_that_is_not_there_is_refused_by_its_key(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", json.dumps(SMOLLM2))
    with pytest.raises(ConfigError, match=r"data\.dataset_name: no file /.*nope\.jsonl"):
        check_model_folder(make(f"policy.model_name={folder}", "data.dataset_name=nope.jsonl"))


@pytest.mark.parametrize(
    ("config", "weights", "says"),
    [
        (None, True, "no config.json"),
        ("{", True, "not readable as JSON"),
        ("[]", True, "not a JSON object"),
        (json.dumps(SMOLLM2), False, "holds no .safetensors file"),
    ],
)
def test_an_unfit_folder_is_refused(tmp_path: Path, config: str | None, weights: bool, says: str) -> None:
    folder = model_folder(tmp_path / "m", config, weights)
    with pytest.raises(ConfigError, match=says) as caught:
        check_model_folder(make(f"policy.model_name={folder}"))
    assert "policy.model_name" in str(caught.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "./model", "models/smollm2", "a/b/c", "runs"])
def test_a_missing_folder_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"policy\.model_name: no folder"):
        find_model(name)


def test_a_hub_name_is_looked_for_in_the_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert find_model("owner/name") is None
    snapshot = model_folder(tmp_path / "models--owner--name" / "snapshots" / "abc", "{}")
    assert find_model("owner/name") == snapshot
