"""`checkpointing`: what is kept of a run so that it can go on."""

from __future__ import annotations

from pydantic import Field

from trireme.config.base import Block, ref

NEMO_KINDS = {"val": "validation"}


class CheckpointingConfig(Block):
    """When a checkpoint is written and which ones are kept."""

    enabled: bool = Field(True, description="Write checkpoints, and resume from the newest one in the folder.")
    checkpoint_dir: str = Field(ref("run.dir") + "/checkpoints", min_length=1, description="Folder of checkpoints.")
    metric_name: str | None = Field(
        None,
        description="Metric of its step by which a checkpoint is ranked, such as validation/accuracy (`val_reward`) or "
        "train/reward; null ranks by age, newest first.",
    )
    higher_is_better: bool = Field(True, description="Rank the largest value of the metric first.")
    keep_top_k: int | None = Field(3, ge=1, description="Number of checkpoints kept; null keeps all.")
    save_period: int = Field(10, ge=1, description="Steps between checkpoints.")
    async_save: bool = Field(
        False, description="Write checkpoints from a copy in host memory while training goes on (needs that memory)."
    )

    @property
    def ranked_by(self) -> str | None:
        """`metric_name` as it is recorded: NeMo-RL's files say val_reward, val:accuracy, train:reward."""
        if self.metric_name == "val_reward":
            return "validation/accuracy"
        kind, colon, name = (self.metric_name or "").partition(":")
        return f"{NEMO_KINDS.get(kind, kind)}/{name}" if colon else self.metric_name
