"""`cluster`: the machines of the trainer."""

from __future__ import annotations

from pydantic import Field

from trireme.config.base import Block


class ClusterConfig(Block):
    """Size of the trainer's cluster."""

    gpus_per_node: int = Field(1, ge=1, description="Accelerators of each trainer node; trainer.nproc follows it.")
    num_nodes: int = Field(1, ge=1, description="Trainer nodes.")
