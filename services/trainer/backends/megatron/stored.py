"""The weights in a checkpoint under their Hugging Face names, read one at a time, without a model or its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from services.trainer.backends.megatron.families import Architecture
from services.trainer.backends.megatron.rules import EMBEDDING, HEAD, LAYER, find_rule, shapes_of

# Megatron's names of what layers, and the experts of a layer, have in common: they lie stacked under one name.
LAYERS, EXPERTS = "decoder.layers.", ".experts.experts."
OPTIMIZER = "optimizer."  # what is not of the model


class StoredWeights:
    """Of the checkpoint in `directory`, which has been checked against its manifest."""

    def __init__(self, directory: Path, architecture: Architecture) -> None:
        self._architecture = architecture
        self._reader = FileSystemReader(directory)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._entries = {
            key: entry
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith(OPTIMIZER)
        }

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights as they were trained."""
        return self._entries[EMBEDDING].properties.dtype

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Memory holds one Megatron parameter at a time. Raises ValueError for one that is not known."""
        shapes, words = shapes_of(self._architecture), self._architecture.hf.vocab_size
        for key, entry in self._entries.items():
            for place in product(*(range(size) for size in entry.size[: _stacked_axes(key)])):
                name = _name(key, place)
                rule, names = find_rule(self._architecture.name, name)
                whole = self._read(key, entry, place)
                parts = rule.split(whole[:words] if name in (HEAD, EMBEDDING) else whole, shapes)
                yield from zip(names, parts, strict=True)

    def _read(self, key: str, entry: TensorStorageMetadata, place: tuple[int, ...]) -> Tensor:
        """What lies at `place` of the stacked axes."""
        shape = entry.size[len(place) :]
        target = torch.empty((1,) * len(place) + tuple(shape), dtype=entry.properties.dtype)
        chunk = ChunkStorageMetadata(torch.Size((*place, *(0 for _ in shape))), target.shape)
        plan = LoadPlan(create_read_items_for_chunk_list(key, entry, [chunk]))
        self._reader.read_data(plan, _Into(target)).wait()
        return target.view(shape)


class _Into(DefaultLoadPlanner):
    """Whatever is read belongs into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._target


def _stacked_axes(key: str) -> int:
    """How many axes in front count layers and experts. Where layers differ, they have names of their own."""
    return int(key.startswith(LAYERS) and LAYER.match(key) is None) + int(EXPERTS in key)


def _name(key: str, place: tuple[int, ...]) -> str:
    """The parameter's name in the whole model."""
    numbers = list(place)
    if key.startswith(LAYERS) and LAYER.match(key) is None:
        key = f"{LAYERS}{numbers.pop(0)}.{key.removeprefix(LAYERS)}"
    return key.replace(EXPERTS, f".experts.{numbers.pop(0)}.") if numbers else key
