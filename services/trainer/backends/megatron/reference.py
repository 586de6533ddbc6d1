"""The model with the weights of a folder, and the frozen reference of a KL penalty: no gradients, no optimizer."""

from __future__ import annotations

from pathlib import Path

from services.trainer.backends.megatron import convert, cpu
from services.trainer.backends.megatron.families import Architecture
from services.trainer.backends.megatron.model import PolicyModel, transformer_config
from services.trainer.backends.megatron.settings import Settings


def build_model(architecture: Architecture, settings: Settings, folder: Path) -> list[PolicyModel]:
    """This rank's part of the model with the folder's weights, on this process's device: one chunk of layers, or
    several where pipeline stages are virtual."""
    config = transformer_config(architecture, settings)
    stages = range(settings.parallel.virtual) if settings.parallel.virtual > 1 else [None]
    with cpu.device_literals():
        chunks = [PolicyModel(architecture, config, stage) for stage in stages]
    if not cpu.active():
        chunks = [chunk.cuda() for chunk in chunks]
    convert.load(chunks, architecture, folder)
    for name, parameter in convert.named_parameters(chunks):
        if settings.router.frozen and ".router." in name:
            parameter.requires_grad_(False)
    return chunks


def build_reference(architecture: Architecture, settings: Settings, folder: Path) -> list[PolicyModel]:
    """The same, frozen and in eval mode."""
    return [chunk.requires_grad_(False).eval() for chunk in build_model(architecture, settings, folder)]
