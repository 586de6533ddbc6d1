"""The whole loop as a user runs it: `trireme up` on a tiny random model, real vLLM, Redis, gRPC and Megatron-Core."""

from __future__ import annotations

import json
import os
import signal
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.rollout.models import make_model

ROOT = Path(__file__).parents[2]
STEPS = 12
LIMIT_S = 600


def write_config(folder: Path, name: str, **grpo: Any) -> Path:
    """A run on the tiny model in `folder/model`, one prompt worded in four ways."""
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": f"word {number}", "answer": string.ascii_lowercase} for number in range(8)]
    prompts.write_text("".join(json.dumps(row | {"verifier": "wanted"}) + "\n" for row in rows))
    text = {
        "run": {"name": name, "dir": str(folder / name)},
        "grpo": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 8,
            "max_num_steps": STEPS,
            "max_num_epochs": 1000,
            "val_at_start": True,
            "val_period": 0,
            "max_val_samples": 2,
        }
        | grpo,
        "loss_fn": {"reference_policy_kl_penalty": 0.01, "use_importance_sampling_correction": True},
        "policy": {
            "model_name": str(folder / "model"),
            "precision": "float32",
            "train_global_batch_size": 32,
            "train_micro_batch_size": 8,
            "max_total_sequence_length": 64,
            "megatron_cfg": {
                "enabled": True,
                "optimizer": {"lr": 5e-3, "min_lr": 5e-3, "weight_decay": 0.0},
                "scheduler": {"lr_warmup_iters": 0},
            },
            "sequence_packing": {"enabled": True},
            "generation": {"max_new_tokens": 12, "vllm_cfg": {"enforce_eager": True}},
        },
        "data": {"dataset_name": str(prompts), "num_validation": 2, "verifier": "wanted"},
        "reward": {"verifiers": ["tests.e2e.verifiers:Wanted"]},
        "checkpointing": {"save_period": 4, "keep_top_k": 2},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(text))
    return path


def start(config: Path, *overrides: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "trireme", "up", str(config), *overrides]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, output


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def left_behind(run_dir: Path) -> list[str]:
    """Command lines of processes that belong to the run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(run_dir) in line and process.pid != os.getpid():
            found.append(line)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("e2e")
    make_model(folder / "model", tied=True, num_key_value_heads=3, intermediate_size=174)  # for three ranks
    yield folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """The folder of a run that went through to its end."""
    code, output = finish(start(write_config(folder, "whole")))
    assert code == 0, output
    return folder / "whole"


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_the_reward_rises(run: Path) -> None:
    rewards = [row["train/reward"] for row in rows(run / "metrics.jsonl") if "train/reward" in row]
    assert len(rewards) == STEPS
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15


@pytest.mark.slow
def test_engine_and_trainer_agree_at_every_step(run: Path) -> None:
    """P-01, W-01, W-02: after every weight update the engine's log-probs are those of the trainer's weights."""
    steps = [row for row in rows(run / "metrics.jsonl") if "train/loss" in row]
    assert max(row["train/token_mult_prob_error_max"] for row in steps) < 1.001
    # As the objective sees it, in its packed micro-batches. The policy's own ratio is 1 by definition: none is stored.
    ratios = [row["train/sampling_importance_ratio"] for row in steps]
    assert min(ratios) > 0.9999 and max(ratios) < 1.0001  # P-15
    assert {row["train/sample_age_max"] for row in steps} == {0.0}


@pytest.mark.slow
def test_what_a_run_leaves_on_disk(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["reward_last5"] > summary["reward_first5"]
    assert summary["heldout_after"] > summary["heldout_before"]
    samples = rows(run / "samples.jsonl")
    assert len(samples) == len({(row["step"], row["id"]) for row in samples}) == STEPS * 32
    assert {version for row in samples for _, _, version in row["versions"]} == set(range(1, STEPS + 1))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_12", "step_8"]
    assert not left_behind(run)


@pytest.mark.slow
def test_the_export_is_a_hugging_face_model(run: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(run / "hf")("word")["input_ids"]
    assert not torch.equal(model.model.embed_tokens.weight, before.model.embed_tokens.weight)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


MEGATRON = "policy.megatron_cfg"
TWO = ["trainer.nproc=2"]
THREE = ["trainer.nproc=3"]
PIPELINE = [f"{MEGATRON}.pipeline_model_parallel_size=2", f"{MEGATRON}.num_layers_in_first_pipeline_stage=1"]
LAYOUTS = {
    "tensor": [*THREE, f"{MEGATRON}.tensor_model_parallel_size=3", f"{MEGATRON}.sequence_parallel=true"],
    "context": [*TWO, f"{MEGATRON}.context_parallel_size=2"],
    "pipeline": [*TWO, *PIPELINE, "checkpointing.async_save=true", "checkpointing.save_period=1"],
}  # data parallelism: see below


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trainer_of_several_ranks_does_what_one_does(layout: str, run: Path, folder: Path) -> None:
    """Through the same services: the samples of the first steps, their rewards and losses, are those of one process."""
    config = write_config(folder, layout, max_num_steps=2, val_at_start=False, max_val_samples=2)
    code, output = finish(start(config, *LAYOUTS[layout], "run.name=whole"))
    assert code == 0, output
    alone = [row for row in rows(run / "metrics.jsonl") if "train/loss" in row]
    steps = [row for row in rows(folder / layout / "metrics.jsonl") if "train/loss" in row]
    assert len(steps) == 2
    for ours, theirs in zip(steps, alone, strict=False):
        assert ours["train/reward"] == theirs["train/reward"]
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-3)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-3)
        assert ours["train/token_mult_prob_error_max"] < 1.001
    assert AutoModelForCausalLM.from_pretrained(folder / layout / "hf")
    assert not left_behind(folder / layout)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_interrupt_checkpoints_and_the_run_goes_on(folder: Path) -> None:
    """C-01, C-02: Ctrl-C in the middle, then the same command: every prompt of every step is trained on once."""
    config = write_config(folder, "resumed", max_num_steps=200, max_val_samples=1)
    process = start(config)
    metrics = folder / "resumed" / "metrics.jsonl"
    deadline = time.monotonic() + LIMIT_S / 2
    while not (metrics.exists() and '"train/loss"' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, output = finish(process)
    done = [row["step"] for row in rows(metrics) if "train/loss" in row]
    assert done == list(range(1, len(done) + 1)) and len(done) < 200, output
    assert (folder / "resumed" / "checkpoints" / f"step_{len(done)}" / "state.json").exists(), output
    assert not left_behind(folder / "resumed")
    last = len(done) + 3
    write_config(folder, "resumed", max_num_steps=last, max_val_samples=1)
    code, output = finish(start(config))
    assert code == 0, output
    assert [row["step"] for row in rows(metrics) if "train/loss" in row] == list(range(1, last + 1))
    groups = {row["id"].split("/")[0] for row in rows(folder / "resumed" / "samples.jsonl")}
    assert groups == {f"resumed-{number}" for number in range(4 * last)}


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_two_trainer_ranks_train_as_one(run: Path, folder: Path) -> None:
    """Global normalisation: the first step of two data-parallel ranks under torchrun is that of one process.

    The engine draws the same samples from the same weights and seeds, so rewards, loss and gradient norm agree.
    """
    config = write_config(folder, "whole", num_prompts_per_step=4, max_num_steps=2)
    code, output = finish(start(config, f"run.dir={folder / 'ranks'}", "trainer.nproc=2"))
    assert code == 0, output
    one, two = (
        next(row for row in rows(where / "metrics.jsonl") if "train/loss" in row) for where in (run, folder / "ranks")
    )
    assert two["train/reward"] == one["train/reward"]
    assert two["train/trained_tokens"] == one["train/trained_tokens"]
    assert two["train/loss"] == pytest.approx(one["train/loss"], abs=1e-5)
    assert two["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-4)
    assert not left_behind(folder / "ranks")
