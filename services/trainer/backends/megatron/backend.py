"""The Backend on Megatron-Core: what each call of the port does, over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.backends.base import Objective, StepResult
from services.trainer.backends.megatron import checkpoint, convert, distributed, forward, micro_batches, reference
from services.trainer.backends.megatron.model import PolicyModel, read_architecture
from services.trainer.backends.megatron.optimizer import Trainable, Update
from services.trainer.backends.megatron.settings import MicroBatching, from_config
from services.trainer.batch import Batch, Normalizer

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
        self.model = reference.build_model(self.architecture, self.settings, self.folder)
        self.trainable = Trainable(self.model, self.settings)
        self._reference: PolicyModel | None = None
        if config.loss_fn.reference_policy_kl_penalty:
            self._reference = reference.build_reference(self.architecture, self.settings, self.folder)

    def log_probs(self, batch: Batch, which: Literal["policy", "reference"] = "policy") -> Tensor:
        model = self._choose(which)
        result = torch.zeros(len(batch.tokens))
        model.eval()
        with torch.no_grad():
            for members in self._micro_batches(batch, self.settings.logprob, apart=False):
                if len(members):
                    result[batch.token_positions(members)] = self._forward(model, batch.select(members))
        return _sum(result)

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        self.model.train()
        self.trainable.zero_grad()
        totals, log_probs = self._accumulate(batch, objective)
        self.trainable.finish_gradients()
        return self._result(self.trainable.step(), totals, log_probs)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from convert.export(self.model, self.architecture, self.settings.publish_dtype)

    def save(self, directory: Path) -> None:
        checkpoint.save(directory, self.model, self.trainable, self.architecture)

    def restore(self, directory: Path) -> None:
        checkpoint.restore(directory, self.model, self.trainable, self.architecture)

    def _choose(self, which: str) -> PolicyModel:
        if which == "policy":
            return self.model
        if self._reference is None:
            raise ValueError("there is no reference model: loss_fn.reference_policy_kl_penalty is 0")
        return self._reference

    def _micro_batches(self, batch: Batch, how: MicroBatching, apart: bool) -> list[Tensor]:
        """Those of this rank."""
        ranks, share, seed = distributed.data_parallel_size(), self.settings.shared_prefix, self.settings.seed
        return micro_batches.split(batch, how, ranks, share, seed, apart)[distributed.data_parallel_rank()]

    def _forward(self, model: PolicyModel, batch: Batch) -> Tensor:
        return forward.log_probs(model, batch, self.settings.temperature, self.settings.shared_prefix)

    def _accumulate(self, batch: Batch, objective: Objective) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients of this rank's micro-batches into the buffers; their summed loss and metrics, and log-probs."""
        normalizer, log_probs = batch.normalizer(), torch.zeros(len(batch.tokens))
        totals: dict[str, Tensor] = {}
        chunks = self._micro_batches(batch, self.settings.train, apart=self.trainable.may_skip_backward)
        for index, members in enumerate(chunks):
            with _last(self.trainable, index == len(chunks) - 1):
                values = self._train(batch, members, objective, normalizer, log_probs)
            totals = {name: totals.get(name, 0.0) + value for name, value in values.items()}
        return totals, log_probs

    def _train(
        self, batch: Batch, members: Tensor, objective: Objective, normalizer: Normalizer, log_probs: Tensor
    ) -> dict[str, Tensor]:
        """Forward and backward of one micro-batch; writes its log-probs, returns its loss and metrics."""
        if not len(members) and self.trainable.may_skip_backward:
            return _nothing(batch, objective, normalizer)
        part = batch.select(members) if len(members) else _masked(batch)
        current = self._forward(self.model, part)
        if len(members):
            log_probs[batch.token_positions(members)] = current.detach()
        # Differentiated in two halves, because the second may have nothing to do.
        leaf = current.detach().requires_grad_()
        loss, metrics = objective(leaf, part, normalizer)
        gradient = torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)[0]
        if gradient.any() or not self.trainable.may_skip_backward:
            current.backward(gradient)
        return {"loss": loss.detach(), **metrics}

    def _result(self, update: Update, totals: dict[str, Tensor], log_probs: Tensor) -> StepResult:
        names = sorted(totals)
        summed = _sum(torch.tensor([float(totals[name]) for name in names], dtype=torch.float64)).tolist()
        metrics = dict(zip(names, summed, strict=True))
        loss = metrics.pop("loss")
        return StepResult(
            loss, update.grad_norm, update.learning_rate, _sum(log_probs), metrics, applied=update.applied
        )


def _last(trainable: Trainable, last: bool) -> AbstractContextManager[None]:
    """Gradients are reduced with the last micro-batch's backward, if they overlap with it at all."""
    return nullcontext() if last else trainable.ddp.no_sync()


def _nothing(batch: Batch, objective: Objective, normalizer: Normalizer) -> dict[str, Tensor]:
    """Zero under every name, for a rank that has fewer sequences than micro-batches."""
    masked = _masked(batch)
    loss, metrics = objective(torch.zeros(len(masked.tokens)), masked, normalizer)
    return {name: torch.zeros_like(value.detach()) for name, value in {"loss": loss, **metrics}.items()}


def _masked(batch: Batch) -> Batch:
    """One sequence that adds nothing to any sum: where a rank has none, gradients are reduced all the same."""
    one = batch.select(torch.tensor([0]))
    return replace(one, loss_mask=torch.zeros_like(one.loss_mask))


def _sum(values: Tensor) -> Tensor:
    """Over data-parallel ranks, each of which has zeros where the others have values."""
    group = distributed.data_parallel_group()
    if group.size() == 1:
        return values
    device = "cpu" if dist.get_backend(group) == "gloo" else "cuda"
    summed = values.to(device)
    dist.all_reduce(summed, group=group)
    return summed.cpu()
