"""One life of a training loop over fakes of its parts."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import torch
from torch import Tensor

from services.trainer.assembly import Group, Member
from services.trainer.checkpoints import Checkpoints
from services.trainer.collecting import DataExhausted
from services.trainer.learning import Learned
from services.trainer.loop import Parts, TrainingLoop
from services.trainer.publishing import PublishReport
from services.trainer.recorders import JsonLines
from services.trainer.server import LoopState
from services.trainer.validation import ValidationResult
from tests.unit.trainer.builders import batch_of, ended, sample
from trireme.config import Config, load_config
from trireme.registry import Kind, ServiceRecord

PROMPTLY_S = 5.0
NONE = grpc.aio.Metadata()
Trouble = Callable[[], Exception | None]


class FakeBackend:
    """Weights that are a number: how often they were restored."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.weight = events, 0.0
        self.saves: list[Future[None]] = []

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", torch.tensor([self.weight])

    def save(self, directory: Path) -> Future[None]:
        self.events.append("save")
        (directory / "weight").write_text(str(self.weight))
        return self.saves.pop(0) if self.saves else ended()

    def restore(self, directory: Path) -> None:
        self.events.append("restore")
        self.weight = float((directory / "weight").read_text()) + 1


class FakeCollector:
    """One group a step; from version `blocked_from` on it waits for ever, from `exhausted_from` on there is no data."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.assembler = SimpleNamespace(counters=Counter())
        self.pending: OrderedDict[str, Any] = OrderedDict()
        self.blocked_from = self.exhausted_from = 10**9
        self.waiting = asyncio.Event()
        self.restored: tuple[dict[str, Any], int] | None = None
        self.taken = 0

    async def admit(self, version: int, *, training: bool = False) -> int:
        self.events.append(f"admit {version}")
        return 0

    async def collect(self, version: int) -> list[Group]:
        if version >= self.exhausted_from:
            raise DataExhausted("0 prompts are left")
        if version >= self.blocked_from:
            await stay(self.waiting, self.events)
        self.events.append(f"collect {version}")
        self.taken += 1
        return [Group("g", 1, {0: Member(0, sample("g", size=1))})]

    def state(self) -> dict[str, Any]:
        return {"taken": self.taken}

    async def restore(self, state: dict[str, Any], version: int) -> None:
        self.restored, self.taken = (state, version), state["taken"]


class FakeLearner:
    """Notes the step. applied: of each call in turn, True when it runs out. fails_at: a version it dies at."""

    def __init__(self, events: list[str], life: int) -> None:
        self.events, self.life = events, life
        self.applied: list[bool | None] = []
        self.fails_at = 0

    def learn(self, groups: Sequence[Group], version: int) -> Learned:
        self.events.append(f"learn {version}")
        if version == self.fails_at:
            raise RuntimeError("killed")
        applied = self.applied.pop(0) if self.applied else True
        batch = batch_of([[True] * version])
        return Learned({"train/reward": float(self.life)}, groups[0].samples, [0.5], batch, applied)


class FakePublisher:
    """Counts versions."""

    def __init__(self, events: list[str], version: int) -> None:
        self.events, self.version = events, version

    async def publish(
        self, tensors: Callable[[], Iterable[tuple[str, Tensor]]], compute: ThreadPoolExecutor
    ) -> PublishReport:
        self.version += 1
        self.events.append(f"publish {self.version}")
        return PublishReport(self.version, 0.0, 0.0, ("rollout-0",), ())


class FakeValidator:
    """Accuracy 0.75, unless `trouble` has something to raise."""

    def __init__(self, events: list[str], trouble: Trouble) -> None:
        self.events, self.trouble = events, trouble

    async def run(self, rollouts: Sequence[str], rewards: Sequence[str], version: int) -> ValidationResult:
        self.events.append(f"validate {version}")
        if error := self.trouble():
            raise error
        assert (rollouts, rewards) == (["rollout:1"], ["reward:1"])
        return ValidationResult(0.75, 4, 0, 2.0, [])


class FakeRegistry:
    """One server of each kind."""

    async def list(self, kind: Kind) -> list[ServiceRecord]:
        return [ServiceRecord(kind, kind, f"{kind}:1", "", 1, 0, "", 0.0)]


async def stay(reached: asyncio.Event, events: list[str]) -> None:
    """Wait for ever, and note when that is cut short."""
    reached.set()
    try:
        await asyncio.Event().wait()
    finally:
        events.append("cancelled")


def configuration(folder: Path, overrides: Sequence[str]) -> Config:
    text = {
        "run": {"name": "r", "dir": str(folder)},
        "grpo": {
            "num_prompts_per_step": 1,
            "num_generations_per_prompt": 2,
            "max_num_steps": 2,
            "val_period": 0,
        },
        "policy": {
            "model_name": "none",
            "train_global_batch_size": 2,
            "train_micro_batch_size": 1,
            "megatron_cfg": {"enabled": True},
            "max_total_sequence_length": 64,
            "generation": {"max_new_tokens": 8},
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "data": {"dataset_name": "reasoning_gym/chain_sum"},
        "checkpointing": {"save_period": 100},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(text))
    return load_config(path, overrides)


class Life:
    """One life of a trainer in `folder`. published: the version that the registry knows of."""

    def __init__(self, folder: Path, *overrides: str, number: int = 1, published: int = 0) -> None:
        self.folder, self.config = folder, configuration(folder, overrides)
        self.events: list[str] = []
        self.state = LoopState("r", self.config.grpo.max_num_steps)
        self.backend, self.collector = FakeBackend(self.events), FakeCollector(self.events)
        self.learner, self.publisher = FakeLearner(self.events, number), FakePublisher(self.events, published)
        self.validator: FakeValidator | None = None
        self.servers_ready: Callable[[], Awaitable[None]] = self._ready
        self.exported: dict[str, float] = {}

    async def _ready(self) -> None:
        self.events.append("servers")

    def _export(self, tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
        self.events.append("export")
        folder.mkdir()
        self.exported = {name: float(tensor) for name, tensor in tensors}

    async def run(self) -> None:
        metrics, samples = JsonLines(self.folder / "metrics.jsonl"), JsonLines(self.folder / "samples.jsonl")
        parts: dict[str, Any] = {
            "backend": self.backend,
            "learner": self.learner,
            "collector": self.collector,
            "publisher": self.publisher,
            "validator": self.validator,
            "checkpoints": Checkpoints(self.folder / "checkpoints", None, None, True),
            "recorders": [metrics],
            "samples": samples,
            "registry": FakeRegistry(),
            "servers_ready": lambda: self.servers_ready(),
            "export": self._export,
        }
        with ThreadPoolExecutor(1) as compute:
            try:
                await TrainingLoop(self.config, self.folder, self.state, Parts(**parts), compute).run()
            finally:
                metrics.close()
                samples.close()

    async def drained_at(self, reached: asyncio.Event) -> None:
        """Run, be asked to drain once `reached` is set, and end promptly."""
        task = asyncio.create_task(self.run())
        await asyncio.wait_for(reached.wait(), PROMPTLY_S)
        self.state.drain.set()
        await asyncio.wait_for(task, PROMPTLY_S)

    def rows(self, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / file).read_text().splitlines()]

    @property
    def checkpoints(self) -> list[str]:
        folder = self.folder / "checkpoints"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())  # type: ignore[no-any-return]
