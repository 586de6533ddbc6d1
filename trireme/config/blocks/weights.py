"""`weights`: how new weights reach the rollout servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trireme.config.base import Block


class WeightsConfig(Block):
    """Transport of weights."""

    transport: Literal["auto", "shm", "grpc"] = Field(
        "auto", description="Shared memory, chunked gRPC, or (`auto`) shared memory for servers on the same host."
    )
    chunk_bytes: int = Field(1_048_576, ge=4096, le=134_217_728, description="Size of a gRPC chunk, in bytes.")
    timeout_s: float = Field(300.0, gt=0, description="Seconds until a server that has not taken an update is left.")
    delta: bool = Field(False, description="Send only what changed since the last version.")
