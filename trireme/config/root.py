"""The whole configuration of a run: all blocks, and what may be asked of them together."""

from __future__ import annotations

from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from omegaconf import OmegaConf
from pydantic import Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from trireme.config import legacy, rules, schema, secrets, tree, unsupported
from trireme.config.base import Block
from trireme.config.blocks.checkpointing import CheckpointingConfig
from trireme.config.blocks.cluster import ClusterConfig
from trireme.config.blocks.data import DataConfig
from trireme.config.blocks.env import EnvConfig
from trireme.config.blocks.grpo import GrpoConfig
from trireme.config.blocks.logger import LoggerConfig
from trireme.config.blocks.loss_fn import LossConfig
from trireme.config.blocks.policy import PolicyConfig
from trireme.config.blocks.preference import DpoConfig, SftConfig
from trireme.config.blocks.redis import RedisConfig
from trireme.config.blocks.reward import RewardConfig
from trireme.config.blocks.rollout import RolloutConfig
from trireme.config.blocks.run import RunConfig
from trireme.config.blocks.security import SecurityConfig
from trireme.config.blocks.staleness import StalenessConfig
from trireme.config.blocks.stream import StreamConfig
from trireme.config.blocks.telemetry import TelemetryConfig
from trireme.config.blocks.trainer import TrainerConfig
from trireme.config.blocks.weights import WeightsConfig
from trireme.config.errors import ConfigError


class Config(Block):
    """One run. `Config.model_validate(tree)` fills defaults, resolves references and checks every rule."""

    grpo: GrpoConfig = Field(default_factory=GrpoConfig, description="Steps, groups, rewards and validation.")
    loss_fn: LossConfig = Field(default_factory=LossConfig, description="The policy loss.")
    policy: PolicyConfig = Field(description="The model under training, its backend and its generation.")
    data: DataConfig = Field(description="Prompts.")
    env: dict[str, EnvConfig] = Field(default_factory=dict, description="Environments, by name.")
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig, description="Checkpoints.")
    logger: LoggerConfig = Field(default_factory=LoggerConfig, description="Recorders of metrics.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="The trainer's machines.")
    dpo: DpoConfig | None = Field(None, description="Direct preference optimisation in place of grpo.")
    sft: SftConfig | None = Field(None, description="Supervised fine-tuning in place of grpo.")
    run: RunConfig = Field(default_factory=RunConfig, description="Name and folder of the run.")
    redis: RedisConfig = Field(default_factory=RedisConfig, description="The Redis server.")
    stream: StreamConfig = Field(default_factory=StreamConfig, description="Delivery between services.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Rollout servers.")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Reward servers.")
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="The trainer.")
    weights: WeightsConfig = Field(default_factory=WeightsConfig, description="Weights on their way to generation.")
    staleness: StalenessConfig = Field(default_factory=StalenessConfig, description="Bound on the age of samples.")
    security: SecurityConfig = Field(default_factory=SecurityConfig, description="Encryption and authentication.")
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig, description="Logs of the services.")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            raise PydanticCustomError("config", "a configuration is a block of keys")
        try:
            return tree.complete(cls, data)
        except ConfigError as error:
            raise _as_validation_error(error) from error

    @model_validator(mode="after")
    def _check(self) -> Config:
        problems = [*rules.violations(self), *unsupported.violations(self)]
        if problems:
            raise _as_validation_error(ConfigError(problems))
        return self

    @property
    def world_size(self) -> int:
        """Trainer ranks on all nodes."""
        return self.trainer.nproc * self.cluster.num_nodes

    @property
    def data_parallel_size(self) -> int:
        """Trainer ranks that hold different data."""
        return self.world_size // self.policy.megatron_cfg.model_parallel_size

    @property
    def optimizer_steps(self) -> int:
        """Those of the whole run: a step makes as many as it has global batches."""
        return self.grpo.max_num_steps * -(-self.grpo.samples_per_step // self.policy.train_global_batch_size)

    def to_tree(self, *, mask: bool = False) -> dict[str, Any]:
        """Plain values, all resolved. `mask` hides passwords and tokens."""
        plain = self.model_dump()
        return secrets.masked(plain) if mask else plain

    def to_yaml(self, *, mask: bool = False) -> str:
        """The resolved configuration; `load_config` on it gives an equal one (unless masked).

        Keys that have no effect and their default value are left out, so that loading it reports nothing anew.
        """
        plain = self.to_tree(mask=mask)
        legacy.drop_silent(plain, lambda path: schema.find(Config, path).get_default())
        return OmegaConf.to_yaml(OmegaConf.create(tree.escaped(plain)))

    def write(self, path: Path) -> None:
        """Write `to_yaml()`, passwords included, to a file that only its owner may read; whole or not at all."""
        with NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8") as file:
            file.write(self.to_yaml())
        Path(file.name).replace(path)

    def override(self, *overrides: str) -> Config:
        """The same with `key=value` changes, checked anew. Raises ConfigError."""
        from trireme.config.loader import from_tree, parse_overrides

        return from_tree(tree.merge([tree.escaped(self.to_tree()), parse_overrides(overrides)]))


def _as_validation_error(error: ConfigError) -> PydanticCustomError:
    return PydanticCustomError("config", "{text}", {"text": str(error), "problems": error.problems})
