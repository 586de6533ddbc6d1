"""A configuration that is fine, and a model folder that looks like one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.unit.config.support import NO_TENSORS
from trireme.cli.main import app

FILE = """\
run: {{name: r, dir: {folder}/run}}
grpo: {{num_prompts_per_step: 2, num_generations_per_prompt: 2, max_num_steps: 3}}
policy:
  model_name: {folder}/model
  train_global_batch_size: 4
  megatron_cfg: {{enabled: true}}
  generation: {{max_new_tokens: 8}}
data: {{dataset_name: reasoning_gym/chain_sum}}
cluster: {{gpus_per_node: 1, num_nodes: 1}}
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 2,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "vocab_size": 32,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TRIREME_REDIS_URL", raising=False)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    (model / "model.safetensors").write_bytes(NO_TENSORS)
    (model / "tokenizer.json").touch()
    path = tmp_path / "run.yaml"
    path.write_text(FILE.format(folder=tmp_path))
    return path


@pytest.fixture
def trireme() -> Callable[..., Result]:
    """Runs the command in this process; asserts that no traceback reaches the user."""

    def run(*words: object) -> Result:
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.output
        return result

    return run
