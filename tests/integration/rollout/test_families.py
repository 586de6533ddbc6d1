"""Families beside Llama take new weights twice and sample from them, as Hugging Face would."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from services.rollout.settings import EngineSettings
from services.rollout.updates import WeightKeeper
from services.rollout.vllm_engine import VllmEngine
from tests.integration.rollout.conftest import KWARGS, MAX_MODEL_LEN
from tests.integration.rollout.generating import SHARED_PROMPT, TOLERANCE, complete, worst_difference
from tests.integration.rollout.models import BOS, EOS, VOCAB, make_tokenizer
from trireme.weights.manifest import build
from trireme.weights.shm import ShmTransport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "dtype": "float32",
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "Qwen2": Qwen2Config(**COMMON, tie_word_embeddings=True),
    # With experts that vLLM's kernel pads.
    "Qwen3-MoE": Qwen3MoeConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, norm_topk_prob=True
    ),
    "Mixtral": MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "Gemma-3": Gemma3TextConfig(
        **COMMON,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=32,
        query_pre_attn_scalar=32,
    ),
}


def fresh(config: PreTrainedConfig, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager").eval()
    gain = 0.0 if config.model_type == "gemma3_text" else 1.0
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=gain * (parameter.ndim == 1), std=0.1)
    return model


def as_published(model: nn.Module) -> dict[str, Tensor]:
    """Under the names of files, each expert by itself."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
async def test_two_updates(family: str, tmp_path: Path) -> None:
    """W-01, W-05, W-16; of experts too, which are packed for their kernel."""
    config = FAMILIES[family]
    fresh(config, 0).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    settings = EngineSettings(
        model=str(tmp_path),
        tokenizer=str(tmp_path),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
        extra=KWARGS,
    )
    run = f"family-test-{os.getpid()}"
    transport = ShmTransport(run)
    engine = await VllmEngine.start(settings)
    try:
        keeper = WeightKeeper(engine, transport, run, timeout_s=30)
        for version in (1, 2):
            weights = fresh(config, version)
            tensors = list(as_published(weights).items())
            await keeper.update(transport.offer(build(version, run, tensors), tensors), in_flight=False)
            completion = await complete(engine, SHARED_PROMPT)
            assert worst_difference(weights, SHARED_PROMPT, completion) < TOLERANCE, version
    finally:
        transport.close()
        await engine.close()
