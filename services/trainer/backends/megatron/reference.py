"""The frozen reference model of a KL penalty: weights only, no gradients, no optimizer."""

from __future__ import annotations

from pathlib import Path

from services.trainer.backends.megatron import convert, cpu
from services.trainer.backends.megatron.model import Architecture, PolicyModel, transformer_config
from services.trainer.backends.megatron.settings import Settings


def build_model(architecture: Architecture, settings: Settings, folder: Path) -> PolicyModel:
    """The model with the folder's weights, on this process's device."""
    config = transformer_config(architecture, settings)
    with cpu.device_literals():
        model = PolicyModel(architecture, config)
    if not cpu.active():
        model.cuda()
    convert.load(model, architecture, folder)
    return model


def build_reference(architecture: Architecture, settings: Settings, folder: Path) -> PolicyModel:
    """The same, frozen and in eval mode."""
    return build_model(architecture, settings, folder).requires_grad_(False).eval()
