"""`env`: one block for each environment, by its name."""

from __future__ import annotations

from pydantic import Field

from trireme.config.base import Block


class EnvConfig(Block):
    """An environment that answers are scored in."""

    num_workers: int = Field(8, ge=1, description="Scoring processes in NeMo-RL; here reward.workers says how many.")
