"""`trainer`: the process group that trains."""

from __future__ import annotations

from pydantic import Field

from trireme.config.base import Block, ref


class TrainerConfig(Block):
    """The trainer's processes."""

    host: str = Field("127.0.0.1", min_length=1, description="Address that the server binds to.")
    port: int = Field(0, ge=0, le=65535, description="Port of the gRPC API; 0 takes any free one.")
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of /metrics and /healthz; 0 takes any free one.")
    nproc: int = Field(ref("cluster.gpus_per_node"), ge=1, description="Trainer ranks on each node.")
    shared_prefix: bool = Field(
        False, description="Compute the prompt of a group once for all its samples in training."
    )
    max_nonfinite_steps: int = Field(
        3, ge=1, description="Steps in a row skipped for a non-finite gradient after which the run fails."
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of each rank; null leaves PyTorch's choice.")
    refill_timeout_s: float = Field(600.0, gt=0, description="Seconds without a scored sample after which it fails.")
