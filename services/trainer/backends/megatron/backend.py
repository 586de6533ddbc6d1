"""The Backend on Megatron-Core: what each call of the port does, under any layout of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from services.trainer.backends.base import Objective, StepResult
from services.trainer.backends.megatron import checkpoint, convert, distributed, micro_batches, passes, reference
from services.trainer.backends.megatron.families import read_architecture
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.backends.megatron.optimizer import Trainable
from services.trainer.backends.megatron.settings import MicroBatching, from_config
from services.trainer.batch import Batch

if TYPE_CHECKING:
    from trireme.config import Config


class MegatronBackend:
    """The policy, its optimizer and, when the loss has a KL penalty, a frozen reference.

    `distributed.initialize(config)` comes first. Raises ValueError naming the key, file or tensor that is wrong.
    """

    def __init__(self, config: Config, model_folder: Path) -> None:
        self.settings = from_config(config)
        self.folder = Path(model_folder)
        self.architecture = read_architecture(self.folder)
        self.chunks = reference.build_model(self.architecture, self.settings, self.folder)
        self.trainable = Trainable(self.chunks, self.settings)
        self._saver = checkpoint.Saver(background=config.checkpointing.async_save)
        self._reference: list[PolicyModel] | None = None
        if config.loss_fn.reference_policy_kl_penalty:
            self._reference = reference.build_reference(self.architecture, self.settings, self.folder)

    def log_probs(self, batch: Batch, which: Literal["policy", "reference"] = "policy") -> Tensor:
        chunks = self._choose(which)
        own = self._deal(batch, self.settings.logprob, apart=False)[distributed.data_parallel_rank()]
        with torch.no_grad():
            for chunk in chunks:
                chunk.eval()
            return passes.log_probs(chunks, batch, own, self.settings)

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        for chunk in self.chunks:
            chunk.train()
        self.trainable.zero_grad()
        dealt = self._deal(batch, self.settings.train, apart=self.trainable.may_skip_backward)
        own = dealt[distributed.data_parallel_rank()]
        totals, log_probs = passes.gradients(self.chunks, batch, own, self.settings, objective, self.trainable)
        self.trainable.finish_gradients()
        update = self.trainable.step()
        metrics = totals | micro_batches.evenness(batch, dealt, self.settings.parallel.sequence_multiple)
        loss = metrics.pop("loss")
        return StepResult(loss, update.grad_norm, update.learning_rate, log_probs, metrics, applied=update.applied)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from convert.export(self.chunks, self.architecture, self.settings.dtype)

    def save(self, directory: Path) -> Future[None]:
        return self._saver.save(directory, self.chunks, self.trainable, self.architecture, self.folder)

    def restore(self, directory: Path) -> None:
        checkpoint.restore(directory, self.chunks, self.trainable, self.architecture, self._saver.group)

    def _choose(self, which: str) -> list[PolicyModel]:
        if which == "policy":
            return self.chunks
        if self._reference is None:
            raise ValueError("there is no reference model: loss_fn.reference_policy_kl_penalty is 0")
        return self._reference

    def _deal(self, batch: Batch, how: MicroBatching, apart: bool) -> list[list[Tensor]]:
        """The micro-batches of each data-parallel rank: equally many, and as many as an interleaved schedule needs."""
        settings, ranks = self.settings, distributed.data_parallel_size()
        rounds = settings.parallel.pipeline if settings.parallel.virtual > 1 else 1
        return micro_batches.split(
            batch,
            how,
            ranks,
            share_prefix=settings.shared_prefix,
            seed=settings.seed + self.trainable.scheduler.num_steps,
            apart=apart,
            rounds=rounds,
            multiple=settings.parallel.sequence_multiple,
        )
