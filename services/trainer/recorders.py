"""Where a run's numbers go: metrics.jsonl and samples.jsonl always, TensorBoard, W&B and MLflow when enabled.

A recorder takes one flat dictionary a step, under NeMo-RL's names. A library that the configuration asks for and
that is not installed is an error at the start, not a run without its plots.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from prometheus_client import Gauge

from trireme.config import Config
from trireme.contracts.v1 import sample_pb2


class Recorder(Protocol):
    """One destination of metrics."""

    def record(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None:
        """Forget what was recorded after `step`, which a resumed run records again; where that can be forgotten."""
        return

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line, flushed at once so that a reader sees it and a crash loses nothing."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        # JSON has no NaN: a reader of any language must be able to parse every line.
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self.write({"step": step, **finite})

    def rewind(self, step: int) -> None:
        """Drop the rows of later steps, and a last line that a crash cut off; the file is replaced at once or not."""
        # Text may hold characters that `splitlines` takes for ends of lines; bytes have one kind.
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= step]
        beside = self._path.with_suffix(".rewound")
        beside.write_bytes(b"".join(kept))
        self._file.close()
        beside.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()


class Prometheus(Recorder):
    """The last value of every metric, for the service's /metrics."""

    _gauge = Gauge("trireme_trainer_metric", "Last value of a training metric, by its name in metrics.jsonl", ["name"])
    _step = Gauge("trireme_trainer_step", "Finished steps")

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step.set(step)
        for name, value in metrics.items():
            self._gauge.labels(name).set(value)

    def close(self) -> None:
        """Nothing to close."""


class TensorBoard(Recorder):
    """Scalars through torch.utils.tensorboard."""

    def __init__(self, directory: Path, options: Mapping[str, Any]) -> None:
        _require("tensorboard", "logger.tensorboard_enabled")
        module = _require("torch.utils.tensorboard", "logger.tensorboard_enabled")
        self._writer = module.SummaryWriter(log_dir=str(directory / "tensorboard"), **options)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Recorder):
    """Weights & Biases, configured by `logger.wandb`."""

    def __init__(self, config: Config, options: Mapping[str, Any]) -> None:
        wandb = _require("wandb", "logger.wandb_enabled")
        self._run = wandb.init(**{"name": config.run.name, **options}, config=config.to_tree(mask=True))

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow(Recorder):
    """MLflow, configured by `logger.mlflow`."""

    def __init__(self, config: Config, options: Mapping[str, Any]) -> None:
        self._mlflow = _require("mlflow", "logger.mlflow_enabled")
        if "tracking_uri" in options:
            self._mlflow.set_tracking_uri(options["tracking_uri"])
        self._mlflow.set_experiment(options.get("experiment_name", config.run.name))
        self._mlflow.start_run(run_name=options.get("run_name", config.run.name))

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _require(module: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{key} is true but {module} cannot be imported ({error}); install it or set {key}=false"
        ) from error


def build_recorders(config: Config, run_dir: Path) -> list[Recorder]:
    """The recorders that the configuration asks for. Raises ValueError naming the key whose library is missing."""
    logger = config.logger
    recorders: list[Recorder] = [JsonLines(run_dir / "metrics.jsonl"), Prometheus()]
    if logger.tensorboard_enabled:
        recorders.append(TensorBoard(Path(logger.log_dir), _options(logger.tensorboard, drop=("log_dir",))))
    if logger.wandb_enabled:
        recorders.append(WeightsAndBiases(config, _options(logger.wandb)))
    if logger.mlflow_enabled:
        recorders.append(MLflow(config, _options(logger.mlflow)))
    return recorders


def _options(block: Any, drop: Iterable[str] = ()) -> dict[str, Any]:
    options = block if isinstance(block, Mapping) else block.model_dump() if block else {}
    return {key: value for key, value in options.items() if value is not None and key not in drop}


def sample_row(step: int, sample: sample_pb2.Sample, reward: float | None) -> dict[str, Any]:
    """What samples.jsonl keeps of one trained sample. `reward` is None where it was masked."""
    return {
        "step": step,
        "id": sample.id,
        "prompt": sample.prompt_text,
        "response": sample.response_text,
        "reward": reward,
        "versions": [[span.start, span.length, span.version] for span in sample.versions],
        "finish_reason": sample_pb2.FinishReason.Name(sample.finish_reason),
        "dataset_index": sample.ref.index,
        "response_tokens": len(sample.response_token_ids),
    }
