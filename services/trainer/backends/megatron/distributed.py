"""The processes of one trainer: torch.distributed and Megatron's parallel groups, under torchrun or alone."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from services.trainer.backends.megatron import cpu
from services.trainer.backends.megatron.settings import Parallelism, parallelism

if TYPE_CHECKING:
    from trireme.config import Config

TIMEOUT = timedelta(minutes=30)


def initialize(config: Config) -> None:
    """Join (or, without torchrun's environment, be) the trainer's processes and set seeds and threads.

    Raises ValueError when the processes cannot be dealt to the layout, or have been dealt to another.
    """
    cpu.install()
    _set_threads(config.trainer.threads)
    if not dist.is_initialized():
        _join()
    _make_groups(parallelism(config.policy.megatron_cfg), config.grpo.seed)


def shutdown() -> None:
    """Leave the processes; safe to call when never initialised."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    cpu.uninstall()


def data_parallel_rank() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_rank()


def data_parallel_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


def data_parallel_size() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_world_size()


def _set_threads(threads: int | None) -> None:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // local)
    if threads is not None:
        torch.set_num_threads(threads)


def _join() -> None:
    backend = "gloo" if cpu.active() else "nccl"
    if not cpu.active():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        # A store in memory: one process needs no port, so none can be taken.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)


def _make_groups(parallel: Parallelism, seed: int) -> None:
    from megatron.core import parallel_state, tensor_parallel

    if parallel_state.model_parallel_is_initialized():
        return _check_groups(parallel)
    copy = parallel.tensor * parallel.pipeline * parallel.context
    if dist.get_world_size() % copy:
        raise ValueError(f"{dist.get_world_size()} ranks are no multiple of TP x PP x CP = {copy}")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual if parallel.virtual > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        create_gloo_process_groups=True,  # checkpoints are gathered over them
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _check_groups(parallel: Parallelism) -> None:
    """Those that there are belong to this layout."""
    from megatron.core import parallel_state

    sizes = {
        "TP": (parallel.tensor, parallel_state.get_tensor_model_parallel_world_size()),
        "PP": (parallel.pipeline, parallel_state.get_pipeline_model_parallel_world_size()),
        "virtual PP": (parallel.virtual, parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1),
        "CP": (parallel.context, parallel_state.get_context_parallel_world_size()),
        "EP": (parallel.expert, parallel_state.get_expert_model_parallel_world_size()),
        "expert TP": (parallel.expert_tensor, parallel_state.get_expert_tensor_parallel_world_size()),
    }
    if different := [f"{name}={there}, not {wanted}" for name, (wanted, there) in sizes.items() if wanted != there]:
        raise ValueError(f"these processes are already a trainer of another layout: {', '.join(different)}")
