"""`policy.dtensor_cfg`: PyTorch FSDP2/DTensor as the training backend."""

from __future__ import annotations

from pydantic import Field

from trireme.config.base import Block


class DTensorConfig(Block):
    """PyTorch FSDP2/DTensor: parallel layout."""

    enabled: bool = Field(False, description="Train with PyTorch FSDP2/DTensor.")
    cpu_offload: bool = Field(False, description="Keep parameters and optimiser state in host memory between uses.")
    sequence_parallel: bool = Field(
        False, description="Shard norms and residuals along the sequence over the tensor-parallel ranks."
    )
    activation_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    tensor_parallel_size: int = Field(1, ge=1, description="Ranks that share each layer (TP).")
    context_parallel_size: int = Field(1, ge=1, description="Ranks that share each sequence (CP).")
    custom_parallel_plan: str | None = Field(None, description="Import path of a tensor-parallel plan.")
