"""What lies beside the weights in a checkpoint: which model it is of, that model's small files, and a manifest.

`manifest.json` has size and checksum of every other file. It is written last, so a folder without it is not a
checkpoint; it is checked in full before anything is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash
from pydantic import BaseModel, ValidationError

from services.trainer.backends.megatron.export import copy_companions
from services.trainer.backends.megatron.families import Architecture
from services.trainer.durable import sync

MANIFEST = "manifest.json"
MODEL_FILES = "model"  # configuration and tokenizer, so that a checkpoint can be exported wherever it is
FORMAT = 1
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
    "rope_parameters",
    "rms_norm_eps",
)
ALL = slice(None)


class File(BaseModel):
    """Of a file in a checkpoint."""

    bytes: int
    xxh3_128: str


class Manifest(BaseModel):
    """ranks: that wrote it. model: what must agree. files: by path in the folder."""

    format: int
    ranks: int
    model: dict[str, Any]
    files: dict[str, File]


def seal(directory: Path, architecture: Architecture, model: Path) -> None:
    """Add the small files of folder `model`, make every file durable, and write the manifest."""
    (directory / MODEL_FILES).mkdir()
    copy_companions(model, directory / MODEL_FILES)
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    content = Manifest(
        format=FORMAT,
        ranks=dist.get_world_size(),
        model=_identity(architecture),
        files={path.relative_to(directory).as_posix(): _fingerprint(path) for path in files},
    )
    for path in files:
        sync(path)
    sync(directory / MODEL_FILES)
    manifest = directory / MANIFEST
    manifest.write_text(content.model_dump_json(indent=1))
    sync(manifest)
    sync(directory)


def checked(directory: Path, architecture: Architecture, share: slice = ALL) -> Manifest:
    """The manifest, when it fits this model and every file of this share of them fits it.

    Raises ValueError naming what does not.
    """
    manifest = _read(directory)
    for key, value in _identity(architecture).items():
        if (theirs := manifest.model.get(key, value)) != value:  # older ones name fewer keys
            raise ValueError(f"checkpoint {directory} is of another model: its {key} is {theirs}, not {value}")
    for name, expected in list(manifest.files.items())[share]:
        try:
            _check_file(directory, name, expected)
        except OSError as error:
            raise ValueError(f"checkpoint {directory}: {name} cannot be read: {error.strerror or error}") from error
    return manifest


def _identity(architecture: Architecture) -> dict[str, Any]:
    return {"architecture": architecture.name, **{key: getattr(architecture.hf, key, None) for key in IDENTITY}}


def _read(directory: Path) -> Manifest:
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(f"{directory} is not a complete checkpoint: it has no {MANIFEST}")
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"checkpoint {directory}: {MANIFEST} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, one['loc']))} {one['msg']}".strip() for one in error.errors())
        raise ValueError(f"checkpoint {directory}: {MANIFEST} is damaged ({what})") from error
    if manifest.format != FORMAT:
        raise ValueError(f"checkpoint {directory} has format {manifest.format}, this version reads {FORMAT}")
    return manifest


def _check_file(directory: Path, name: str, expected: File) -> None:
    path = directory / name
    if not path.is_file():
        raise ValueError(f"checkpoint {directory}: {name} is missing")
    if path.stat().st_size != expected.bytes:
        raise ValueError(f"checkpoint {directory}: {name} has {path.stat().st_size} bytes, not {expected.bytes}")
    if _fingerprint(path) != expected:
        raise ValueError(f"checkpoint {directory}: {name} is damaged: its checksum differs")


def _fingerprint(path: Path) -> File:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return File(bytes=path.stat().st_size, xxh3_128=digest.hexdigest())
