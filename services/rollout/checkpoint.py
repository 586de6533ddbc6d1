"""What the model folder says: which weights a version must bring, and which token ids end a response."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.contracts.v1.weights_pb2 import WeightManifest
from trireme.weights.manifest import WeightsError

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
# Buffers that old checkpoints carry and that models compute themselves.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")


@dataclass(frozen=True)
class Checkpoint:
    """Shapes by Hugging Face name (empty: unknown), whether the head is the embedding, and the end tokens."""

    shapes: dict[str, tuple[int, ...]]
    tied: bool
    eos_token_ids: frozenset[int]

    def check(self, manifest: WeightManifest) -> None:
        """Raise WeightsError unless the manifest brings exactly this checkpoint's tensors, in its shapes."""
        sent = {t.name: tuple(t.shape) for t in manifest.tensors}
        if self.tied and HEAD in sent:
            _check_tied(manifest)
            del sent[HEAD]
        if not self.shapes:
            return
        missing, unexpected = sorted(self.shapes.keys() - sent.keys()), sorted(sent.keys() - self.shapes.keys())
        if missing or unexpected:
            raise WeightsError(
                f"weights version {manifest.version} do not fit the model: missing {_some(missing)}, "
                f"unexpected {_some(unexpected)}"
            )
        for name, shape in sent.items():
            if shape != self.shapes[name]:
                raise WeightsError(
                    f"tensor {name!r} of version {manifest.version} has shape {list(shape)}, "
                    f"the model's has {list(self.shapes[name])}"
                )


def read(folder: Path) -> Checkpoint:
    """Read a model folder. Without *.safetensors in it the shapes are unknown and nothing is checked by name."""
    config, generation = _json(folder / "config.json"), _json(folder / "generation_config.json")
    text_config = config.get("text_config", config)
    tied = bool(text_config.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        shapes |= _header_shapes(path)
    expected = {k: v for k, v in shapes.items() if not k.endswith(IGNORED_SUFFIXES) and not (tied and k == HEAD)}
    ends = (config.get("eos_token_id"), text_config.get("eos_token_id"), generation.get("eos_token_id"))
    return Checkpoint(expected, tied, frozenset(i for ids in ends for i in _ids(ids)))


def _header_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes from a safetensors header, without reading the tensors."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def _check_tied(manifest: WeightManifest) -> None:
    """A tied model may be sent its head again, as long as it is the embedding."""
    sums = {t.name: t.checksum for t in manifest.tensors}
    embedding = next((name for name in sums if name.endswith(EMBEDDING)), None)
    if embedding and sums[embedding] != sums[HEAD]:
        raise WeightsError(
            f"weights version {manifest.version}: {HEAD} differs from {embedding}, but the model ties them"
        )


def _ids(value: Any) -> Iterable[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _some(names: list[str], limit: int = 6) -> str:
    shown = ", ".join(names[:limit]) or "nothing"
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
