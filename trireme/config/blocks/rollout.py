"""`rollout`: the servers that generate."""

from __future__ import annotations

from pydantic import Field

from trireme.config.base import Block


class RolloutConfig(Block):
    """Rollout servers, one vLLM engine each."""

    replicas: int = Field(1, ge=1, description="Rollout servers that `trireme up` starts.")
    host: str = Field("127.0.0.1", min_length=1, description="Address that the server binds to.")
    port: int = Field(0, ge=0, le=65535, description="Port of the gRPC API; 0 takes any free one.")
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of /metrics and /healthz; 0 takes any free one.")
    max_concurrent_groups: int = Field(8, ge=1, description="Prompts of the stream in work at a time in one server.")
    request_timeout_s: float = Field(600.0, gt=0, description="Seconds until one generation is given up.")
    startup_timeout_s: float = Field(600.0, gt=0, description="Seconds until a server that is not healthy is an error.")
