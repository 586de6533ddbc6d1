"""`env`: one block for each environment, by its name."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from trireme.config.base import Block


class EnvConfig(Block):
    """An environment that answers are scored in."""

    num_workers: int = Field(8, ge=1, description="Scoring processes in NeMo-RL; here reward.workers says how many.")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the verifier of this name, added to each of its tasks, such as "
        "`extraction: last_line` for reasoning_gym or `format: gsm8k` for math.",
    )
