"""Checkpoints: resuming is bit-exact, and what cannot be resumed from is refused before anything changes."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.trainer.backends.megatron.backend import MegatronBackend
from services.trainer.checkpoints import CheckpointError, Checkpoints
from tests.integration.megatron.support import (
    make_config,
    make_model,
    policy_gradient,
    ragged_batch,
    weights_of,
)

WARM_UP = {
    "policy.megatron_cfg.scheduler.lr_warmup_iters": 5,
    "policy.megatron_cfg.scheduler.lr_warmup_init": 1e-5,
    "policy.megatron_cfg.optimizer.weight_decay": 0.1,
}


@pytest.fixture(scope="module")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[MegatronBackend, Path]:
    """A backend after three steps and its checkpoint."""
    backend = MegatronBackend(make_config(tiny, WARM_UP), tiny)
    for seed in range(3):
        backend.step(ragged_batch(seed), policy_gradient)
    folder = tmp_path_factory.mktemp("checkpoint")
    backend.save(folder).result()
    return backend, folder


def test_a_disk_that_is_full_is_an_os_error_and_leaves_the_older_one(
    trained: tuple[MegatronBackend, Path], tmp_path: Path
) -> None:
    """C-07 with the real writers: a limit on the size of files stands for the end of the disk."""
    backend, _ = trained
    checkpoints = Checkpoints(tmp_path, keep_top_k=1, metric_name=None, higher_is_better=True)
    checkpoints.save(1, {}, backend.save)()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(CheckpointError, match=r"step 2 .*earlier checkpoints are intact") as caught:
            checkpoints.save(2, {}, backend.save)()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(caught.value.__cause__, OSError)
    assert [one.step for one in checkpoints.all()] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    backend.restore(checkpoints.all()[0].policy)


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_resuming_is_bit_exact(precision: str, background: bool, tiny: Path, tmp_path: Path) -> None:
    """C-03, C-04, C-08: losses, norms, rates, random numbers and weights of later steps, some of which are taken while
    the checkpoint is being written."""
    changes = {**WARM_UP, "policy.precision": precision, "checkpointing.async_save": background}
    backend = MegatronBackend(make_config(tiny, changes), tiny)
    for seed in range(5):
        backend.step(ragged_batch(seed), policy_gradient)
    saving = backend.save(tmp_path)
    assert background or saving.done()
    expected = [backend.step(ragged_batch(seed), policy_gradient) for seed in range(5, 10)]
    drawn = torch.rand(3)
    saving.result()

    resumed = MegatronBackend(make_config(tiny, changes), tiny)
    torch.rand(7)
    resumed.restore(tmp_path)
    for seed, before in zip(range(5, 10), expected, strict=True):
        after = resumed.step(ragged_batch(seed), policy_gradient)
        assert (after.loss, after.grad_norm, after.learning_rate) == (
            before.loss,
            before.grad_norm,
            before.learning_rate,
        )
        assert torch.equal(after.log_probs, before.log_probs)
    assert torch.equal(torch.rand(3), drawn)
    final = weights_of(backend)
    assert all(torch.equal(tensor, final[name]) for name, tensor in resumed.tensors())


def test_a_backend_that_has_trained_can_be_set_back(trained: tuple[MegatronBackend, Path], tiny: Path) -> None:
    """C-04: moments of other steps leave no trace."""
    _, folder = trained
    results = []
    for steps in (0, 4):
        backend = MegatronBackend(make_config(tiny, WARM_UP), tiny)
        for seed in range(steps):
            backend.step(ragged_batch(10 + seed), policy_gradient)
        backend.restore(folder)
        results.append([backend.step(ragged_batch(seed), policy_gradient).grad_norm for seed in (3, 4, 5)])
    assert results[0] == results[1]


def test_saving_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    saving, other = (MegatronBackend(make_config(tiny, WARM_UP), tiny) for _ in range(2))
    for seed in range(3):
        (tmp_path / str(seed)).mkdir()
        saving.save(tmp_path / str(seed)).result()
        assert (
            saving.step(ragged_batch(seed), policy_gradient).loss
            == other.step(ragged_batch(seed), policy_gradient).loss
        )
    final = weights_of(other)
    assert all(torch.equal(tensor, final[name]) for name, tensor in saving.tensors())


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def edit(file: Path) -> None:
    manifest = json.loads(file.read_text())
    manifest["format"] = 99
    file.write_text(json.dumps(manifest))


def retype(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "files": 7}))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("__0_0.distcp", cut, r"__0_0\.distcp has \d+ bytes, not \d+"),
        ("__0_0.distcp", flip, r"__0_0\.distcp is damaged"),
        ("__0_0.distcp", Path.unlink, r"__0_0\.distcp is missing"),
        ("common.pt", Path.unlink, r"common\.pt is missing"),
        (".metadata", flip, r"\.metadata is damaged"),
        ("random_0.pt", cut, r"random_0\.pt has"),
        ("model/config.json", Path.unlink, r"model/config\.json is missing"),
        ("manifest.json", Path.unlink, "not a complete checkpoint"),
        ("manifest.json", cut, r"manifest\.json is damaged"),
        ("manifest.json", edit, "has format 99"),
        ("manifest.json", retype, r"manifest\.json is damaged \(files Input should be"),
    ],
)
def test_damage_is_named_before_anything_changes(
    name: str,
    damage: Callable[[Path], None],
    message: str,
    tiny: Path,
    tmp_path: Path,
    trained: tuple[MegatronBackend, Path],
) -> None:
    """C-07: a save that was interrupted has no manifest."""
    shutil.copytree(trained[1], tmp_path, dirs_exist_ok=True)
    damage(tmp_path / name)
    backend = MegatronBackend(make_config(tiny, WARM_UP), tiny)
    before = weights_of(backend)
    with pytest.raises(ValueError, match=message):
        backend.restore(tmp_path)
    assert all(torch.equal(tensor, before[key]) for key, tensor in backend.tensors())
    assert backend.step(ragged_batch(), policy_gradient).learning_rate == pytest.approx(1e-5)


def test_other_experts_make_another_model(tmp_path: Path) -> None:
    """Of shapes that are the same."""
    shape = {"family": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 24}
    two, one = (make_model(tmp_path / str(chosen), **shape, num_experts_per_tok=chosen) for chosen in (2, 1))
    (tmp_path / "checkpoint").mkdir()
    MegatronBackend(make_config(two), two).save(tmp_path / "checkpoint").result()
    with pytest.raises(ValueError, match="of another model: its num_experts_per_tok is 2, not 1"):
        MegatronBackend(make_config(one), one).restore(tmp_path / "checkpoint")


def test_the_checkpoint_of_another_model_is_refused(trained: tuple[MegatronBackend, Path], tmp_path: Path) -> None:
    other = make_model(tmp_path, intermediate_size=96)
    backend = MegatronBackend(make_config(other), other)
    with pytest.raises(ValueError, match="of another model: its intermediate_size is 80, not 96"):
        backend.restore(trained[1])
