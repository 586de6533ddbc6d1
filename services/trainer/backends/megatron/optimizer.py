"""Megatron's DDP buffers, optimizer and learning-rate schedule, and one step taken with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from services.trainer.backends.megatron import cpu
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.backends.megatron.settings import Settings


@dataclass(frozen=True)
class Update:
    """What a step did; the rate is the one that it used. applied: False for a gradient that was not finite."""

    grad_norm: float
    learning_rate: float
    applied: bool


class Trainable:
    """A model under training: gradient buffers, float32 masters and moments, schedule.

    Build it from a model whose weights are already loaded: the masters are copied from them here.
    """

    def __init__(self, chunks: Sequence[PolicyModel], settings: Settings) -> None:
        with cpu.device_literals():
            self.ddp = [
                DistributedDataParallel(chunk.config, ddp_config(settings), chunk, disable_bucketing=index > 0)
                for index, chunk in enumerate(chunks)
            ]
            self.optimizer: MegatronOptimizer = get_megatron_optimizer(optimizer_config(settings), self.ddp)
        self._pipelined = settings.parallel.pipeline > 1
        chunks[0].config.no_sync_func = self.no_sync
        for part in self.parts():
            cpu.tune_optimizer(part.optimizer)
        self.scheduler = make_scheduler(self.optimizer, settings)

    @property
    def may_skip_backward(self) -> bool:
        """Whether a micro-batch whose gradient is zero may do without its backward pass: not when reductions wait for
        it, or other ranks."""
        first = self.ddp[0]
        return not (
            first.ddp_config.overlap_grad_reduce or self._pipelined or first.config.expert_model_parallel_size > 1
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Reduce no gradients over data-parallel ranks inside."""
        with ExitStack() as stack:
            for each in self.ddp:
                stack.enter_context(each.no_sync())
            yield

    def parts(self) -> list[Any]:
        """Megatron's optimizers, one for dense and one for expert weights."""
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def zero_grad(self) -> None:
        """Start a step's accumulation."""
        for each in self.ddp:
            each.zero_grad_buffer()
        self.optimizer.zero_grad()

    def finish_gradients(self) -> None:
        """Sum the gradient over data-parallel ranks."""
        with cpu.device_literals():
            finalize_model_grads(self.ddp)

    def step(self) -> Update:
        """Clip by the global norm and update, unless that norm is not finite: then nothing changes."""
        rate = learning_rate(self.optimizer)
        with cpu.device_literals():
            overflow = self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            applied = not overflow and math.isfinite(norm)
            if applied:
                for part in self.parts():
                    clip(part, norm)
                self.optimizer.step_with_ready_grads()
        if applied:
            self.scheduler.step(1)
        return Update(norm, rate, applied)


def clip(part: Any, norm: float) -> None:
    """Clip the gradient of one of Megatron's optimizers by the global `norm`."""
    limit, parameters = part.config.clip_grad, part.get_parameters()
    # As Megatron computes it.
    coefficient = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
    if parameters and not cpu.clip_in_step(part.optimizer, coefficient) and coefficient < 1:
        # The precision-aware optimizer reads gradients from another attribute.
        decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        clip_grad_by_total_norm_fp32(parameters, limit, norm, use_decoupled_grad=decoupled)


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """The rate that the next step uses."""
    return float(optimizer.param_groups[0]["lr"])


def ddp_config(settings: Settings) -> DistributedDataParallelConfig:
    """overlap_param_gather is not offered: it hides gathers behind the next forward pass, but what a step has made is
    published, and so gathered, before there is one."""
    overlap = settings.ddp.overlap_grad_reduce and not cpu.active()
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=settings.ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=True,
        # Gradients over ranks are summed: each loss is divided by the whole batch's tokens already.
        average_in_collective=False,
        check_for_nan_in_grad=False,
    )


def optimizer_config(settings: Settings) -> OptimizerConfig:
    """Megatron's, from policy.megatron_cfg.optimizer."""
    wanted = settings.optimizer
    return OptimizerConfig(
        optimizer=wanted.optimizer,
        lr=wanted.lr,
        min_lr=wanted.min_lr,
        weight_decay=wanted.weight_decay,
        adam_beta1=wanted.adam_beta1,
        adam_beta2=wanted.adam_beta2,
        adam_eps=wanted.adam_eps,
        sgd_momentum=wanted.sgd_momentum,
        clip_grad=wanted.clip_grad,
        bf16=settings.dtype is torch.bfloat16,
        params_dtype=settings.dtype,
        use_distributed_optimizer=True,
        # Lives in Transformer Engine's Adam.
        use_precision_aware_optimizer=wanted.use_precision_aware_optimizer and not cpu.active(),
        # Masters that are only the bits which bfloat16 lacks could not be gathered for a checkpoint: it is in float32.
        store_param_remainders=False,
    )


def make_scheduler(optimizer: Any, settings: Settings) -> OptimizerParamScheduler:
    """Megatron's, from policy.megatron_cfg.scheduler; its unit is one optimizer step."""
    wanted, rate = settings.scheduler, settings.optimizer
    steps = wanted.lr_decay_iters or settings.horizon
    return OptimizerParamScheduler(
        optimizer,
        # Megatron asserts an order among these even where they are of no effect. Where they have one, the rules of the
        # configuration have seen to it.
        init_lr=min(wanted.lr_warmup_init, rate.lr),
        max_lr=rate.lr,
        min_lr=min(rate.min_lr, rate.lr),
        lr_warmup_steps=wanted.lr_warmup_iters,
        lr_decay_steps=max(steps, wanted.lr_warmup_iters + 1),
        lr_decay_style=wanted.lr_decay_style,
        start_wd=_or(wanted.start_weight_decay, rate.weight_decay),
        end_wd=_or(wanted.end_weight_decay, rate.weight_decay),
        wd_incr_steps=steps,
        wd_incr_style=wanted.weight_decay_incr_style,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
