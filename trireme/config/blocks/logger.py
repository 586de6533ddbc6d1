"""`logger`: where metrics of a run go, beside its own files."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from trireme.config.base import Block, ref


class GpuMonitoringConfig(Block):
    """How often GPU use is sampled."""

    collection_interval: float = Field(10.0, gt=0, description="Seconds between samples.")
    flush_interval: float = Field(10.0, gt=0, description="Seconds between writes to the loggers.")


class LoggerConfig(Block):
    """Recorders of metrics."""

    log_dir: str = Field(ref("run.dir") + "/logs", min_length=1, description="Folder of logs and of TensorBoard files.")
    num_val_samples_to_print: int = Field(0, ge=0, description="Validation samples written to the log each time.")
    wandb_enabled: bool = Field(False, description="Record in Weights & Biases.")
    tensorboard_enabled: bool = Field(False, description="Record in TensorBoard.")
    mlflow_enabled: bool = Field(False, description="Record in MLflow.")
    wandb: dict[str, Any] = Field(default_factory=dict, description="Arguments of wandb.init, such as project.")
    tensorboard: dict[str, Any] = Field(default_factory=dict, description="Arguments of TensorBoard's SummaryWriter.")
    mlflow: dict[str, Any] = Field(
        default_factory=dict, description="MLflow settings: experiment_name, run_name, tracking_uri."
    )
    monitor_gpus: bool = Field(False, description="Record GPU use.")
    gpu_monitoring: GpuMonitoringConfig = Field(
        default_factory=GpuMonitoringConfig, description="How often GPU use is sampled."
    )
