"""Rank 0's loop: collect, learn, publish, until the last step or until asked to drain.

The event loop stays free for gRPC: everything that computes runs on one thread of its own, the only one that ever
touches the backend. A step is finished when its weights are published; a checkpoint is only taken between steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import torch

from services.trainer.assembly import Group
from services.trainer.backends.base import Backend
from services.trainer.batch import Batch, to_bytes
from services.trainer.checkpoints import Checkpoint, Checkpoints
from services.trainer.collecting import Collector, DataExhausted
from services.trainer.learning import Learned, Learner
from services.trainer.publishing import Publisher
from services.trainer.recorders import JsonLines, Recorder, sample_row
from services.trainer.server import LoopState
from services.trainer.summary import Summary
from services.trainer.validation import NoServers, ValidationResult, Validator
from trireme.config import Config
from trireme.registry import Kind, Registry
from trireme.streams.errors import StreamsError
from trireme.tasks import end

log = logging.getLogger(__name__)
T = TypeVar("T")

EXPORT_FOLDER = "hf"
VALIDATION_ATTEMPTS = 3


class NonFiniteError(Exception):
    """Gradients were not finite for too many steps in a row; the message names the file with the last batch."""


@dataclass
class Parts:
    """What the loop is composed of."""

    backend: Backend
    learner: Learner
    collector: Collector
    publisher: Publisher
    validator: Validator | None
    checkpoints: Checkpoints
    recorders: Sequence[Recorder]
    samples: JsonLines
    registry: Registry
    servers_ready: Callable[[], Awaitable[None]]  # returns once there are servers to generate and to score
    export: Callable[[Iterable[tuple[str, torch.Tensor]], Path], None]


class TrainingLoop:
    """One run, from its first publish to its summary. `compute` is the thread that owns the backend."""

    def __init__(self, config: Config, run_dir: Path, state: LoopState, parts: Parts, compute: ThreadPoolExecutor):
        self._config, self._run_dir, self._state, self._parts, self._compute = config, run_dir, state, parts, compute
        self._summary = Summary()
        self._skipped = 0
        self._measured: dict[str, float] = {}  # of the last step only: a checkpoint is ranked by these
        self._checkpointed_at = self._measured_at = -1
        self._saving: asyncio.Task[Checkpoint] | None = None

    @property
    def steps_left(self) -> int:
        return self._state.max_steps - self._state.step

    async def run(self) -> None:
        """Raises what ended the run early; returns after the last step, or after a drain."""
        try:
            await self._run()
        finally:
            if self._saving is not None:  # completed whatever ended the run; its error would hide that
                await asyncio.wait({self._saving})

    async def _run(self) -> None:
        started = time.monotonic()
        await self._resume()
        await self._publish()
        await self._until_drained(self._parts.servers_ready())
        if self._state.step == 0 and self._config.grpo.val_at_start:
            await self._validate()
        while self.steps_left > 0 and not self._state.drain.is_set():
            try:
                await self._step()
            except DataExhausted as error:
                log.info("the data is used up", extra={"step": self._state.step, "reason": str(error)})
                self._state.max_steps = self._state.step
        await self._finish(started)

    async def _step(self) -> None:
        """One step, or nothing when a drain is asked for before its groups are there."""
        started = time.monotonic()
        self._state.phase = "generating"
        groups = await self._until_drained(self._parts.collector.collect(self._parts.publisher.version))
        if groups is None:
            return
        collected = time.monotonic()
        await self._parts.collector.admit(self._parts.publisher.version, training=True)
        self._state.phase = "training"
        learned = await self._on_compute(self._parts.learner.learn, groups, self._parts.publisher.version)
        self._check_finite(learned)
        published = await self._publish()
        self._state.step += 1
        self._record(learned, published, groups, collected - started, time.monotonic() - started)
        if self._due(self._config.grpo.val_period):
            await self._validate()
        if self._due(self._config.checkpointing.save_period):
            await self._checkpoint()

    def _due(self, period: int) -> bool:
        """Periodic work after a step; what the last step needs is `_finish`'s."""
        return self.steps_left > 0 and period > 0 and self._state.step % period == 0

    async def _publish(self) -> dict[str, float]:
        self._state.phase = "publishing"
        report = await self._parts.publisher.publish(self._parts.backend.tensors, self._compute)
        self._state.weight_version = report.version
        return report.metrics()

    async def _validate(self) -> None:
        """Measure the policy; given up at a drain. A failure costs the measurement, never the run."""
        if self._parts.validator is None or self._state.drain.is_set():
            return
        self._state.phase = "validating"
        started = time.monotonic()
        result = await self._until_drained(self._validated(self._parts.validator))
        if result is None:
            return
        self._report(self._state.step, result.metrics() | {"timing/validation/total": time.monotonic() - started})
        self._summary.validated(result.accuracy)
        self._show_samples(result)

    async def _validated(self, validator: Validator) -> ValidationResult | None:
        """Servers may die and come back at other addresses meanwhile."""
        for attempt in range(VALIDATION_ATTEMPTS):
            try:
                await self._parts.servers_ready()
                rollouts, rewards = await self._addresses("rollout"), await self._addresses("reward")
                return await validator.run(rollouts, rewards, self._parts.publisher.version)
            except (grpc.aio.AioRpcError, TimeoutError, NoServers, StreamsError) as error:
                log.error("validation failed", extra={"attempt": attempt + 1, "reason": str(error)})
        return None

    async def _addresses(self, kind: Kind) -> list[str]:
        return [record.address for record in await self._parts.registry.list(kind)]

    def _show_samples(self, result: ValidationResult) -> None:
        for sample in result.samples[: self._config.logger.num_val_samples_to_print]:
            log.info("validation sample", extra={"prompt": sample.prompt_text, "response": sample.response_text})

    async def _checkpoint(self) -> None:
        if not self._config.checkpointing.enabled or self._checkpointed_at == self._state.step:
            return
        self._state.phase = "checkpointing"
        self._warn_of_rank()
        await self._saved()
        state = {
            "step": self._state.step,
            "weight_version": self._parts.publisher.version,
            "collector": self._parts.collector.state(),
            "summary": self._summary.state(),
            "metrics": self._measured,
            "model": self._config.policy.model_name,
        }
        arguments = self._state.step, state, self._parts.backend.save
        complete = await self._on_compute(self._parts.checkpoints.save, *arguments)
        self._checkpointed_at = self._state.step
        self._saving = asyncio.create_task(asyncio.to_thread(complete))
        if not self._config.checkpointing.async_save:
            await self._saved()

    def _warn_of_rank(self) -> None:
        name = self._config.checkpointing.ranked_by
        if name is not None and name not in self._state.metrics:
            log.warning(
                "checkpointing.metric_name was never measured: the newest checkpoints stay", extra={"metric": name}
            )

    async def _saved(self) -> None:
        """Wait for the checkpoint that is being written. Raises CheckpointError when it could not be."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def _resume(self) -> None:
        """Go on from the newest checkpoint. Versions never go back, even where the run had got further than it."""
        found = self._parts.checkpoints.latest() if self._config.checkpointing.enabled else None
        if found is None:
            return
        state = found.state()
        log.info("resuming", extra={"checkpoint": str(found.path), "step": state["step"]})
        if state.get("model", self._config.policy.model_name) != self._config.policy.model_name:
            # Its weights are overwritten; a reference model keeps them.
            log.warning("the run began with another policy.model_name", extra={"model": state["model"]})
        await self._on_compute(self._parts.backend.restore, found.policy)
        for rows in (*self._parts.recorders, self._parts.samples):
            rows.rewind(state["step"])
        self._state.step = self._checkpointed_at = state["step"]
        self._state.metrics = state["metrics"]
        self._summary.restore(state["summary"])
        self._parts.publisher.version = max(self._parts.publisher.version, state["weight_version"])
        await self._parts.collector.restore(state["collector"], self._parts.publisher.version + 1)

    async def _finish(self, started: float) -> None:
        """After the last step: validate, checkpoint, export. After a drain: checkpoint, so that the run can go on."""
        if self.steps_left == 0:
            await self._validate()
        await self._checkpoint()
        await self._saved()
        if self.steps_left == 0:
            await self._export(self._run_dir / EXPORT_FOLDER)
        seconds = time.monotonic() - started
        self._summary.write(self._run_dir / "summary.json", steps=self._state.step, seconds=seconds)
        self._state.phase = "done"

    async def _export(self, folder: Path) -> None:
        self._state.phase = "exporting"
        await self._on_compute(lambda: self._parts.export(self._parts.backend.tensors(), folder))

    def _check_finite(self, learned: Learned) -> None:
        if learned.applied is None:
            return
        self._skipped = 0 if learned.applied else self._skipped + 1
        if self._skipped >= self._config.trainer.max_nonfinite_steps:
            path = self._save_batch(learned.batch)
            raise NonFiniteError(
                f"gradients were not finite in {self._skipped} steps in a row (trainer.max_nonfinite_steps);"
                f" the last batch is in {path}"
            )

    def _save_batch(self, batch: Batch) -> Path:
        path = self._run_dir / f"nonfinite_step_{self._state.step + 1}.safetensors"
        path.write_bytes(to_bytes(batch))
        return path

    def _record(
        self, learned: Learned, published: dict[str, float], groups: Sequence[Group], waited: float, total: float
    ) -> None:
        counters = self._parts.collector.assembler.counters
        generated = float(sum(len(sample.response_token_ids) for sample in learned.samples))
        metrics = learned.metrics | published
        # Ahead of training, generation goes on while a step trains: there the wait says nothing of its speed.
        generating = total if self._config.staleness.max_versions else waited
        metrics |= {
            "timing/train/generation": waited,
            "timing/train/total_step_time": total,
            "train/generated_tokens": generated,
            "train/generation_tokens_per_s": generated / generating if generating > 0 else 0.0,
            "train/stale_groups_total": float(counters["stale_groups"]),
            "train/duplicate_samples_total": float(counters["duplicate_samples"]),
        }
        self._report(self._state.step, metrics)
        self._summary.stepped(metrics)
        for sample, reward in zip(learned.samples, learned.rewards, strict=True):
            self._parts.samples.write(sample_row(self._state.step, sample, reward))

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        if step != self._measured_at:
            self._measured, self._measured_at = {}, step
        self._measured |= metrics
        self._state.metrics |= metrics
        self._state.groups_in_flight = len(self._parts.collector.pending)
        for recorder in self._parts.recorders:
            recorder.record(step, metrics)

    async def _on_compute(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compute, call, *arguments)

    async def _until_drained(self, work: Awaitable[T]) -> T | None:
        """The result of `work`, or None as soon as a drain is asked for."""
        task, drain = asyncio.ensure_future(work), asyncio.ensure_future(self._state.drain.wait())
        try:
            await asyncio.wait({task, drain}, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            for pending in (task, drain):
                await end(pending)
