"""`trireme export`: a checkpoint of any family and layout becomes the folder that `transformers` loads."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.trainer.backends.megatron import distributed
from services.trainer.backends.megatron.backend import MegatronBackend
from services.trainer.export_checkpoint import parse, run
from tests.integration.megatron.support import (
    make_batch,
    make_config,
    make_model,
    policy_gradient,
    ragged_batch,
    reference_log_probs,
    run_ranks,
    weights_of,
)
from tests.integration.megatron.test_parity import SHAPES

FAMILIES = [
    "tied, grouped queries",
    "all biases",
    "Qwen3",
    "Qwen3-MoE",
    "Qwen3-MoE with a dense layer",
    "Mixtral",
    "Gemma-3",
]


def export(*arguments: str | Path) -> str:
    """What the command does, in this process."""
    return run(parse([str(argument) for argument in arguments]))


def save_step(backend: MegatronBackend, folder: Path) -> Path:
    """The checkpoint of `backend` as a run has it."""
    (folder / "policy").mkdir(parents=True, exist_ok=True)
    backend.save(folder / "policy").result()
    return folder


@pytest.fixture(scope="module")
def checkpoint(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = MegatronBackend(make_config(tiny), tiny)
    return save_step(backend, tmp_path_factory.mktemp("run") / "checkpoints" / "step_3")


@pytest.mark.parametrize("shape", FAMILIES)
def test_it_holds_the_weights_that_were_trained(shape: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", **SHAPES[shape])
    (folder / "tokenizer.json").write_text("a tokenizer")
    backend = MegatronBackend(make_config(folder), folder)
    backend.step(ragged_batch(), policy_gradient)
    step = save_step(backend, tmp_path / "step_1")
    expected = weights_of(backend)
    shutil.rmtree(folder)  # a checkpoint needs nothing but itself
    export(step, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "a tokenizer"
    assert_log_probs(tmp_path / "out", backend)


def assert_log_probs(folder: Path, backend: MegatronBackend) -> None:
    batch = make_batch([(5, [9, 4])])
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    assert model.dtype == torch.float32
    with torch.no_grad():
        theirs: Tensor = reference_log_probs(model, batch)
    assert float((theirs - backend.log_probs(batch)).abs().max()) <= 1e-4


LAYOUTS = {
    "tp2": {"policy.megatron_cfg.tensor_model_parallel_size": 2},
    "pp2": {"policy.megatron_cfg.pipeline_model_parallel_size": 2},
    "dp2": {},
}


def save_layouts(rank: int, folder: Path, out: Path) -> None:
    from megatron.core import parallel_state

    for name, layout in LAYOUTS.items():
        config = make_config(folder, {**layout, "trainer.nproc": 2})
        distributed.initialize(config)
        backend = MegatronBackend(config, folder)
        (out / name / "policy").mkdir(parents=True, exist_ok=True)
        backend.save(out / name / "policy").result()
        parallel_state.destroy_model_parallel()


def test_the_layout_of_the_ranks_leaves_no_trace(tiny: Path, tmp_path: Path) -> None:
    """W-09, W-11: an odd vocabulary, whose padding under TP is not exported, and an embedding on two stages."""
    run_ranks(2, save_layouts, tiny, tmp_path)
    source = load_file(tiny / "model.safetensors")
    for name in LAYOUTS:
        export(tmp_path / name, tmp_path / f"{name}_out")
        written = load_file(tmp_path / f"{name}_out" / "model.safetensors")
        assert written.keys() == source.keys()
        assert all(torch.equal(tensor, source[key]) for key, tensor in written.items()), name


def test_the_precision_can_be_chosen(checkpoint: Path, tiny: Path, tmp_path: Path) -> None:
    assert "LlamaForCausalLM in bfloat16" in export(checkpoint, tmp_path / "out", "--precision", "bfloat16")
    source = load_file(tiny / "model.safetensors")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(tensor, source[name].bfloat16()) for name, tensor in written.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_the_command(checkpoint: Path, tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trireme", "export", str(checkpoint), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and f"{tmp_path / 'out'} written in" in done.stdout
    written, source = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", tiny))
    assert all(torch.equal(tensor, source[name]) for name, tensor in written.items())
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 2 and "is not empty; --force replaces it" in again.stderr
    assert "Traceback" not in again.stderr


def test_what_is_no_checkpoint_names_those_that_are_near(checkpoint: Path, tmp_path: Path) -> None:
    for folder in (checkpoint.parent, checkpoint.parent.parent, checkpoint.parent / "step_9"):
        with pytest.raises(ValueError, match=f"choose one of {checkpoint}"):
            export(folder, tmp_path / "out")
    with pytest.raises(ValueError, match="nothing does not exist$"):
        export(tmp_path / "nothing", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_refused_and_nothing_is_written(checkpoint: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(checkpoint, tmp_path / "step_3")
    file = broken / "policy" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"__0_0\.distcp has"):
        export(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_not_replaced_unless_asked(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(ValueError, match="--force replaces it"):
        export(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / "precious").exists()
    export(checkpoint, tmp_path / "out", "--force")
    assert not (tmp_path / "out" / "precious").exists()


def test_a_disk_that_is_full_leaves_what_was_there(checkpoint: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for its end."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
        with pytest.raises(OSError, match="out"):
            export(checkpoint, tmp_path / "out", "--force")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out" / "precious").exists()


def test_two_at_once_do_not_mix(checkpoint: Path, tmp_path: Path) -> None:
    beside = tmp_path / ".out.partial"
    beside.mkdir()
    (beside / "of an export that was killed").write_text("x")
    other = os.open(beside, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another export is writing it"):
        export(checkpoint, tmp_path / "out")
    os.close(other)
    export(checkpoint, tmp_path / "out")
    assert not beside.exists() and not (tmp_path / "out" / "of an export that was killed").exists()


def test_a_link_stays_one(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    export(checkpoint, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_place_where_nothing_can_be_written_is_named(checkpoint: Path, tmp_path: Path) -> None:
    for target in (checkpoint, checkpoint.parent):
        with pytest.raises(ValueError, match="the checkpoint is in it"):
            export(checkpoint, target, "--force")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="it is a file"):
        export(checkpoint, tmp_path / "file", "--force")
    with pytest.raises(ValueError, match="no is not a folder"):
        export(checkpoint, tmp_path / "no" / "out")


def test_the_folder_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", intermediate_size=96)
    with pytest.raises(ValueError, match="its intermediate_size is 80, not 96"):
        export(checkpoint, tmp_path / "out", "--model", other)
