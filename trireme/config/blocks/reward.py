"""`reward`: the servers that score."""

from __future__ import annotations

from pydantic import Field

from trireme.config.blocks.listening import Listening


class RewardConfig(Listening):
    """Reward servers and their pool of scoring processes."""

    replicas: int = Field(1, ge=1, description="Reward servers that `trireme up` starts.")
    workers: int = Field(2, ge=1, description="Scoring processes of one server.")
    timeout_s: float = Field(10.0, gt=0, description="Seconds until one scoring is stopped and counted as failed.")
    max_attempts: int = Field(3, ge=1, description="Attempts at a sample before its scoring counts as failed for good.")
    policy_failure_score: float = Field(
        0.0, description="Reward of an answer that cannot be scored for a fault of the model's."
    )
    verifiers: list[str] | None = Field(
        None, description='Verifiers of your own beside the built-in ones, each as "package.module:Class".'
    )
    memory_mib: int = Field(4096, ge=0, description="Address space of one scoring process in MiB; 0 sets no limit.")
