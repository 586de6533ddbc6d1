"""`rollout`: the servers that generate."""

from __future__ import annotations

from pydantic import Field

from trireme.config.blocks.listening import Listening


class RolloutConfig(Listening):
    """Rollout servers, one vLLM engine each."""

    replicas: int = Field(1, ge=1, description="Rollout servers that `trireme up` starts.")
    max_concurrent_groups: int = Field(8, ge=1, description="Prompts of the stream in work at a time in one server.")
    request_timeout_s: float = Field(600.0, gt=0, description="Seconds until one generation is given up.")
    startup_timeout_s: float = Field(600.0, gt=0, description="Seconds until a server that is not healthy is an error.")
