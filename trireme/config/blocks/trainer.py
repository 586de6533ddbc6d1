"""`trainer`: the process group that trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trireme.config.base import ref
from trireme.config.blocks.listening import Listening


class TrainerConfig(Listening):
    """The trainer's processes."""

    nproc: int = Field(ref("cluster.gpus_per_node"), ge=1, description="Trainer ranks on each node.")
    shared_prefix: bool | Literal["auto"] = Field(
        False,
        description="Compute the prompt of a group once for all its samples in training; auto: on CPUs, without CP.",
    )
    max_nonfinite_steps: int = Field(
        3, ge=1, description="Steps in a row skipped for a non-finite gradient after which the run fails."
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of each rank; null leaves PyTorch's choice.")
    startup_timeout_s: float = Field(
        600.0, gt=0, description="Seconds until a trainer that has read no data, or does not answer yet, is an error."
    )
    refill_timeout_s: float = Field(600.0, gt=0, description="Seconds without a scored sample after which it fails.")
