"""Checkpoints in Megatron's distributed format: weights, optimizer, schedule and random states.

Beside Megatron's files lie one file of random states per rank and `manifest.json`: which model this is, and size and
checksum of every file. It is written last, so a folder without it is not a checkpoint; it is checked in full before
anything is loaded.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint import save as save_sharded

from services.trainer.backends.megatron import cpu
from services.trainer.backends.megatron.families import Architecture
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.backends.megatron.optimizer import Trainable

MANIFEST = "manifest.json"
FORMAT = 1
# Any number of ranks can read it, and 0.16.1 refuses its own default here. Megatron adds to the copy that it is given.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
# What must agree for weights to fit: a subset of the Hugging Face configuration.
IDENTITY = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)


class InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's format written by this process: its own writer starts helper processes, which hang a script without
    a `__main__` guard and cost seconds each time."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        writer = FileSystemWriter(checkpoint_dir, single_file_per_rank=True, sync_files=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        save_sharded(mcore_to_pyt_state_dict(state, False), storage_writer=writer, planner=planner)


def save(directory: Path, chunks: Sequence[PolicyModel], trainable: Trainable, architecture: Architecture) -> None:
    """Write a checkpoint into an existing empty folder; on disk when it returns. Raises OSError when it cannot be."""
    try:
        with cpu.device_literals():
            state = _sharded_state(chunks, trainable, is_loading=False)
            dist_checkpointing.save(state, str(directory), sharded_strategy=InProcessSave())
        _save_random(directory)
    except (RuntimeError, CheckpointException) as error:  # PyTorch's words for a disk that is full, among others
        raise OSError(str(error).strip().splitlines()[-1]) from error  # after the tracebacks of other ranks
    dist.barrier()
    if dist.get_rank() == 0:
        _write_manifest(directory, architecture)
    dist.barrier()


def restore(directory: Path, chunks: Sequence[PolicyModel], trainable: Trainable, architecture: Architecture) -> None:
    """Load a checkpoint. Raises ValueError naming the folder and what is wrong, before anything has changed."""
    manifest = _check(directory, architecture)
    with cpu.device_literals():
        loaded = dist_checkpointing.load(_sharded_state(chunks, trainable, is_loading=True), str(directory))
        for index, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded[f"model{index}"])
        _load_optimizer(trainable, loaded)
    trainable.scheduler.num_steps = loaded["schedule"]["num_steps"]
    trainable.scheduler.step(0)
    if manifest["ranks"] == dist.get_world_size():
        _load_random(directory)


def _sharded_state(chunks: Sequence[PolicyModel], trainable: Trainable, is_loading: bool) -> dict[str, Any]:
    weights = {f"model{index}": chunk.sharded_state_dict(metadata=dict(METADATA)) for index, chunk in enumerate(chunks)}
    for part in trainable.parts():
        _ensure_moments(part.optimizer)
    steps = max(cpu.steps_taken(part.optimizer) for part in trainable.parts())
    with _padding_kept(trainable):
        state = trainable.optimizer.sharded_state_dict(weights, is_loading, metadata=dict(METADATA))
    for part in trainable.parts():
        # Megatron hands torch's Adam one count for all its parameters here.
        cpu.set_steps_taken(part.optimizer, steps)
    schedule = {"num_steps": trainable.scheduler.num_steps, "optimizer_steps": steps}
    return {**weights, "optimizer": state, "schedule": schedule}


@contextmanager
def _padding_kept(trainable: Trainable) -> Iterator[None]:
    """Megatron leaves the padding between buckets out of what it gathers here, yet finds each parameter in it by a
    position that counts the padding: behind a padded bucket, moments and masters would be those of a neighbour. Inside,
    no element counts as padding."""
    owners = [owner for each in trainable.ddp for owner in (*each.buffers, *each.expert_parallel_buffers)]
    sizes = [(owner, owner.numel) for owner in owners]
    sizes += [(bucket, bucket.grad_data.numel()) for owner in owners for bucket in owner.buckets]
    before = [owner.numel_unpadded for owner, _ in sizes]
    try:
        for owner, size in sizes:
            owner.numel_unpadded = size
        yield
    finally:
        for (owner, _), size in zip(sizes, before, strict=True):
            owner.numel_unpadded = size


def _ensure_moments(optimizer: torch.optim.Optimizer) -> None:
    """Adam's state before its first step, which Megatron expects to exist."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = torch.zeros_like(parameter.data)
            if cpu.active() and "step" not in state:
                state["step"] = torch.tensor(0.0)


def _load_optimizer(trainable: Trainable, loaded: dict[str, Any]) -> None:
    """Masters and moments. Rates and decays come from this run's configuration and schedule."""
    states = loaded["optimizer"]
    for index, part in enumerate(trainable.parts()):
        cpu.hide_steps_taken(part.optimizer)
        state = states if "param_state" in states else states[index]
        part.load_parameter_state_from_fully_reshardable(state["param_state"])
        cpu.set_steps_taken(part.optimizer, loaded["schedule"]["optimizer_steps"])


def _random_file(directory: Path) -> Path:
    return directory / f"random_{dist.get_rank()}.pt"


def _save_random(directory: Path) -> None:
    kind, keys, *rest = np.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "cuda": None if cpu.active() else torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
    }
    torch.save(states, _random_file(directory))


def _load_random(directory: Path) -> None:
    states = torch.load(_random_file(directory), weights_only=True)
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and not cpu.active():
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])


def _identity(architecture: Architecture) -> dict[str, Any]:
    return {"architecture": architecture.name, **{key: getattr(architecture.hf, key, None) for key in IDENTITY}}


def _write_manifest(directory: Path, architecture: Architecture) -> None:
    files = {path.name: _fingerprint(path) for path in sorted(directory.iterdir()) if path.is_file()}
    manifest = {
        "format": FORMAT,
        "ranks": dist.get_world_size(),
        "model": _identity(architecture),
        "files": files,
    }
    for name in files:
        _sync(directory / name)
    path = directory / MANIFEST
    path.write_text(json.dumps(manifest, indent=1))
    _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def _check(directory: Path, architecture: Architecture) -> dict[str, Any]:
    """The manifest, when it fits this model and every file fits it. Rank 0 reads the files, all ranks learn."""
    verdict: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            verdict = [_checked_manifest(directory, architecture)]
        except ValueError as error:
            verdict = [str(error)]
    dist.broadcast_object_list(verdict, src=0)
    if isinstance(verdict[0], str):
        raise ValueError(verdict[0])
    return verdict[0]


def _checked_manifest(directory: Path, architecture: Architecture) -> dict[str, Any]:
    manifest = _read_manifest(directory)
    ours, theirs = _identity(architecture), manifest["model"]
    for key, value in ours.items():
        if theirs.get(key) != value:
            raise ValueError(f"checkpoint {directory} is of another model: its {key} is {theirs.get(key)}, not {value}")
    for name, expected in manifest["files"].items():
        _check_file(directory / name, expected)
    return manifest


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(f"{directory} is not a complete checkpoint: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"checkpoint {directory}: {MANIFEST} is damaged ({error})") from error
    if manifest.get("format") != FORMAT:
        raise ValueError(f"checkpoint {directory} has format {manifest.get('format')}, this version reads {FORMAT}")
    return manifest


def _check_file(path: Path, expected: dict[str, Any]) -> None:
    if not path.is_file():
        raise ValueError(f"checkpoint {path.parent}: {path.name} is missing")
    if path.stat().st_size != expected["bytes"]:
        size = path.stat().st_size
        raise ValueError(f"checkpoint {path.parent}: {path.name} has {size} bytes, not {expected['bytes']}")
    if _fingerprint(path) != expected:
        raise ValueError(f"checkpoint {path.parent}: {path.name} is damaged: its checksum differs")
