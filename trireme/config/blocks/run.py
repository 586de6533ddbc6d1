"""`run`: what a run is called and where its files go."""

from __future__ import annotations

from pydantic import Field

from trireme.config.base import Block, ref


class RunConfig(Block):
    """Name and folder of a run."""

    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run; prefixes its keys in Redis."
    )
    dir: str = Field("runs/" + ref("run.name"), min_length=1, description="Folder of the run's files.")
