"""Two ranks do what one does. Needs no trainer in this process but compares with one."""

from __future__ import annotations

import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from services.trainer.backends.base import StepResult
from services.trainer.backends.megatron import distributed, optimizer
from services.trainer.backends.megatron.backend import MegatronBackend
from services.trainer.batch import Batch
from tests.integration.megatron.support import (
    PLAIN_GRADIENT,
    make_batch,
    make_config,
    of_the_batch,
    one_step,
    policy_gradient,
    ragged_batch,
    relative,
    run_ranks,
    weights_of,
)

ONE_EACH: dict[str, Any] = {"policy.sequence_packing.enabled": False, "policy.train_micro_batch_size": 1}
CASES: dict[str, tuple[Batch, dict[str, Any]]] = {
    # Nine sequences over two ranks: one more micro-batch on one of them, and one sequence without a trained token.
    "ragged, packed": (ragged_batch(), {"policy.sequence_packing.train_mb_tokens": 40}),
    "ragged, one by one": (ragged_batch(), ONE_EACH),
    "ragged, shared prompts": (ragged_batch(), {"trainer.shared_prefix": True}),
    "fewer sequences than ranks": (make_batch([(5, [9])]), {}),
}

# At a rate so small that three steps stay comparable.
OVERLAPPED = {**PLAIN_GRADIENT, "policy.megatron_cfg.optimizer.lr": 2.0**20, **CASES["ragged, packed"][1]}
# (rank, bytes that a file may have there): rank 0's first small file, its share of the weights, the other's share.
FULL = [(0, 16), (0, 8192), (1, 4096)]
DAMAGED = ["__0_0.distcp", "__1_0.distcp", "random_0.pt", "random_1.pt"]


def run_cases(rank: int, folder: Path, out: Path) -> None:
    config = make_config(folder)
    distributed.initialize(config)
    for number, (batch, changes) in enumerate(CASES.values()):
        result, weights = one_step(folder, batch, {**PLAIN_GRADIENT, **changes})
        torch.save({"result": vars(result), "weights": weights}, out / f"{number}_{rank}.pt")
    _save_log_probs(folder, out / f"log_probs_{rank}.pt")
    _save_middle(rank, folder, out)
    _save_overlapped(rank, folder, out)
    _save_on_full_disks(rank, folder, out)
    _restore_damaged(rank, folder, out)


def _save_log_probs(folder: Path, file: Path) -> None:
    torch.save(MegatronBackend(make_config(folder), folder).log_probs(ragged_batch()), file)


def _save_middle(rank: int, folder: Path, out: Path) -> None:
    """A checkpoint after one step, written while the second is taken, and the weights after that."""
    backend = MegatronBackend(make_config(folder, {"checkpointing.async_save": True}), folder)
    backend.step(ragged_batch(0), policy_gradient)
    (out / "checkpoint").mkdir(exist_ok=True)
    saving = backend.save(out / "checkpoint")
    result = backend.step(ragged_batch(1), policy_gradient)
    saving.result()
    torch.save({"result": vars(result), "weights": weights_of(backend)}, out / f"second_{rank}.pt")


def _save_overlapped(rank: int, folder: Path, out: Path) -> None:
    """What CUDA would do, in many buckets: gradients are reduced while the last backward pass goes on."""
    original = optimizer.ddp_config
    optimizer.ddp_config = lambda settings: replace(original(settings), overlap_grad_reduce=True, bucket_size=3000)
    try:
        backend = MegatronBackend(make_config(folder, OVERLAPPED), folder)
        assert len(backend.trainable.ddp[0].bucket_groups) > 3
        results = [vars(backend.step(ragged_batch(seed), policy_gradient)) for seed in range(3)]
    finally:
        optimizer.ddp_config = original
    torch.save({"results": results, "weights": weights_of(backend)}, out / f"overlapped_{rank}.pt")


def _save_on_full_disks(rank: int, folder: Path, out: Path) -> None:
    """A limit on the size of files, of one rank at a time, stands for the end of its disk."""
    backend = MegatronBackend(make_config(folder), folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number, (full, limit) in enumerate(FULL):
        target = out / f"full_{number}"
        target.mkdir(exist_ok=True)
        if rank == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            backend.save(target).result()
        except OSError:
            (out / f"full_{number}_{rank}").mkdir()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (out / "free").mkdir(exist_ok=True)
    backend.save(out / "free").result()


def _restore_damaged(rank: int, folder: Path, out: Path) -> None:
    """What each rank says of a checkpoint of which one file is damaged, and the weights that it has then."""
    backend = MegatronBackend(make_config(folder), folder)
    said = []
    for number, name in enumerate(DAMAGED):
        damaged = out / f"damaged_{number}"
        if rank == 0:
            shutil.copytree(out / "checkpoint", damaged)
            with (damaged / name).open("ab") as file:
                file.write(b"x")
        torch.distributed.barrier()
        try:
            backend.restore(damaged)
        except ValueError as error:
            said.append(str(error))
    torch.save({"said": said, "weights": weights_of(backend)}, out / f"damaged_{rank}.pt")


@pytest.fixture(scope="module")
def two_ranks(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(2, run_cases, tiny, out)
    return out


def read(file: Path) -> tuple[StepResult, dict[str, Tensor]]:
    saved = torch.load(file, weights_only=True)
    return StepResult(**saved["result"]), saved["weights"]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(case: str, tiny: Path, two_ranks: Path) -> None:
    """L-03, M-05, M-07, K-10, K-13: loss, metrics, log-probs, grad norm and the weights after the step."""
    batch, changes = CASES[case]
    alone, alone_weights = one_step(tiny, batch, {**PLAIN_GRADIENT, **changes})
    number = list(CASES).index(case)
    for rank in range(2):
        result, weights = read(two_ranks / f"{number}_{rank}.pt")
        assert result.loss == pytest.approx(alone.loss, rel=1e-5)
        assert result.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
        assert of_the_batch(result.metrics) == pytest.approx(of_the_batch(alone.metrics), rel=1e-5)
        assert float((result.log_probs - alone.log_probs).abs().max()) <= 1e-5
        assert all(relative(weights[name], alone_weights[name]) <= 1e-5 for name in alone_weights)


def test_reductions_that_overlap_change_nothing(tiny: Path, two_ranks: Path) -> None:
    alone = MegatronBackend(make_config(tiny, OVERLAPPED), tiny)
    expected = [alone.step(ragged_batch(seed), policy_gradient) for seed in range(3)]
    for rank in range(2):
        saved = torch.load(two_ranks / f"overlapped_{rank}.pt", weights_only=True)
        for result, other in zip(saved["results"], expected, strict=True):
            assert (result["loss"], result["grad_norm"]) == pytest.approx((other.loss, other.grad_norm), rel=1e-5)
        assert all(relative(saved["weights"][name], tensor) <= 1e-5 for name, tensor in alone.tensors())


def test_a_full_disk_of_one_rank_fails_the_save_of_all(tiny: Path, two_ranks: Path) -> None:
    """C-07: none is left waiting for another, no checkpoint comes of it, and the next save is whole."""
    for number in range(len(FULL)):
        assert all((two_ranks / f"full_{number}_{rank}").is_dir() for rank in range(2))
        assert not (two_ranks / f"full_{number}" / "manifest.json").exists()
    MegatronBackend(make_config(tiny), tiny).restore(two_ranks / "free")


def test_every_rank_hears_of_a_damaged_file(tiny: Path, two_ranks: Path) -> None:
    """C-07: each reads some of the files, all refuse the checkpoint, and none has changed."""
    source = load_file(tiny / "model.safetensors")
    for rank in range(2):
        saved = torch.load(two_ranks / f"damaged_{rank}.pt", weights_only=True)
        folders = (two_ranks / f"damaged_{number}" for number in range(len(DAMAGED)))
        expected = [f"checkpoint {folder}: {name} has" for folder, name in zip(folders, DAMAGED, strict=True)]
        assert [text[: len(start)] for text, start in zip(saved["said"], expected, strict=True)] == expected
        assert all(torch.equal(saved["weights"][name], source[name]) for name in source)


def test_log_probs_are_gathered_from_all_ranks(tiny: Path, two_ranks: Path) -> None:
    expected = MegatronBackend(make_config(tiny), tiny).log_probs(ragged_batch())
    for rank in range(2):
        gathered = torch.load(two_ranks / f"log_probs_{rank}.pt", weights_only=True)
        assert float((gathered - expected).abs().max()) <= 1e-5


def test_one_rank_reads_the_checkpoint_of_two(tiny: Path, two_ranks: Path) -> None:
    """C-06: the moments are there too, or the second step would differ."""
    backend = MegatronBackend(make_config(tiny), tiny)
    backend.restore(two_ranks / "checkpoint")
    result = backend.step(ragged_batch(1), policy_gradient)
    expected, weights = read(two_ranks / "second_0.pt")
    assert result.loss == pytest.approx(expected.loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    # Adam's update is the rate times a ratio of moments: compare it on the scale of the rate, 1e-3.
    assert all(float((tensor - weights[name]).abs().mean()) <= 1e-6 for name, tensor in backend.tensors())
