"""`staleness`: the bound on the age of what is trained."""

from __future__ import annotations

from pydantic import Field

from trireme.config.base import Block, ref


class StalenessConfig(Block):
    """The hard bound on age. It restates grpo.async_grpo, and may not contradict it."""

    max_versions: int = Field(
        ref("age_limit:${grpo.async_grpo.enabled},${grpo.async_grpo.max_trajectory_age_steps}"),
        ge=0,
        description="Largest age of a trained token, in weight versions; null takes it from grpo.async_grpo "
        "(0 when that is off).",
    )
