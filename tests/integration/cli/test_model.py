"""The demonstration model, made for real from the installed package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trireme.cli.model import COMPLETE


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_is_an_ordinary_hugging_face_folder_that_answers(tmp_path: Path) -> None:
    """Checked by Transformers and by what the model knows, not against our own output."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "smollm2"
    command = [sys.executable, "-m", "trireme", "model", "smollm2", str(folder)]
    subprocess.run(command, check=True, timeout=500)
    assert set(COMPLETE) <= {path.name for path in folder.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (2, 2)
    assert "repetition_penalty" not in generation  # P-06: it would bend the sampled distribution
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008  # as on the model's card
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(reply[0, inputs["input_ids"].shape[1] :])
