"""A Hugging Face folder from a model in training: weights, configuration, tokenizer, complete or not there at all."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from services.trainer.durable import sync

SHARD_BYTES = 4 << 30
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def export(tensors: Iterable[tuple[str, Tensor]], source: Path, target: Path, dtype: torch.dtype) -> None:
    """Write `tensors`, cast to `dtype`, as folder `target`, with everything but the weights copied from `source`.

    Written beside and renamed: `target` is the old folder or the whole new one, but for a kill between two renames,
    which leaves the old one beside it as `.<name>.old`. Raises ValueError when its parent does not exist, `target` is
    `source`, or somebody else is writing it, and OSError when it cannot be written.
    """
    target = target.resolve()  # what a link points to is replaced, not the link
    if target == source.resolve():
        raise ValueError(f"cannot export to {target}: it is the folder that the model came from")
    if not target.parent.is_dir():
        raise ValueError(f"cannot export to {target}: {target.parent} is not a folder")
    with _folder_beside(target) as beside:
        copy_companions(source, beside)
        _write_config(source, beside, dtype)
        try:
            _write_weights(tensors, beside, dtype)
        except SafetensorError as error:  # its word for a disk that is full, among others
            raise OSError(f"cannot export to {target}: {error}") from error
        _swap(beside, target)


@contextmanager
def _folder_beside(target: Path) -> Iterator[Path]:
    """An empty folder that is this process's own as long as it lives; gone afterwards, if it still has this name."""
    beside = target.with_name(f".{target.name}.partial")
    beside.mkdir(exist_ok=True)
    lock = os.open(beside, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in beside.iterdir():  # of an export that was killed
            path.unlink()
    except BlockingIOError:
        os.close(lock)
        raise ValueError(f"cannot export to {target}: another export is writing it") from None
    try:
        yield beside
    finally:
        if beside.exists() and os.path.samestat(beside.stat(), os.fstat(lock)):
            shutil.rmtree(beside, ignore_errors=True)
        os.close(lock)


def copy_companions(source: Path, folder: Path) -> None:
    """Everything in a model folder but weights: configuration, tokenizer, licence."""
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, folder / path.name)


def _write_config(source: Path, folder: Path, dtype: torch.dtype) -> None:
    config = json.loads((source / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    config.update({key: name for key in ("dtype", "torch_dtype") if key in config} or {"dtype": name})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_weights(tensors: Iterable[tuple[str, Tensor]], folder: Path, dtype: torch.dtype) -> None:
    """One file, or numbered shards with an index when the weights are large; memory holds one shard."""
    where: dict[str, int] = {}
    shard: dict[str, Tensor] = {}
    count, total, size = 0, 0, 0
    for name, tensor in tensors:
        # A copy, because a view of the live weights would carry its whole buffer into the file.
        part = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        if shard and size + part.nbytes > SHARD_BYTES:
            save_file(shard, folder / _shard_name(count), metadata={"format": "pt"})
            shard, size, count = {}, 0, count + 1
        shard[name], where[name] = part, count
        size, total = size + part.nbytes, total + part.nbytes
    save_file(shard, folder / _shard_name(count), metadata={"format": "pt"})
    for index in range(count + 1):
        (folder / _shard_name(index)).chmod(0o644)  # safetensors writes them for their owner only
    _name_shards(folder, where, count + 1, total)


def _shard_name(index: int) -> str:
    return f"shard-{index}.safetensors"


def _name_shards(folder: Path, where: dict[str, int], count: int, total: int) -> None:
    if count == 1:
        (folder / _shard_name(0)).rename(folder / "model.safetensors")
        return
    names = [f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]
    for index, name in enumerate(names):
        (folder / _shard_name(index)).rename(folder / name)
    index_file = {"metadata": {"total_size": total}, "weight_map": {name: names[i] for name, i in where.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=2) + "\n")


def _swap(beside: Path, target: Path) -> None:
    """Put the finished folder in place. A folder cannot be renamed over a full one, so the old one steps aside."""
    for path in beside.iterdir():
        sync(path)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    beside.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)
