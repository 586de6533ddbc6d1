"""Checkpoints in Megatron's distributed format: weights, optimizer, schedule, and a file of random states per rank.

What lies beside Megatron's files, and how a checkpoint is known to be whole, is in `manifest`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint import save as save_sharded

from services.trainer.backends.megatron import cpu, manifest
from services.trainer.backends.megatron.families import Architecture
from services.trainer.backends.megatron.manifest import Manifest
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.backends.megatron.optimizer import Trainable
from services.trainer.backends.megatron.stored import OPTIMIZER

# Any number of ranks can read it, and 0.16.1 refuses its own default here. Megatron adds to the copy that it is given.
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    # The optimizer's state is gathered in host memory, by the first data-parallel rank and not by all of them.
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}


# Ranks wait here for the disk of the slowest; one that dies closes its sockets at once.
FILES_TIMEOUT = timedelta(days=1)


class Writer(TorchDistSaveShardedStrategy):
    """Megatron's format written by this process: its own writer starts helper processes, which hang a script without
    a `__main__` guard and cost seconds each time.

    Megatron's `save` only hands over what is to be written, as copies in host memory if `copy`; `write` writes it.
    Before that, rank 0 alone has written a file: `agree` is where the others learn how that went.
    """

    def __init__(self, copy: bool, agree: Callable[[], None]) -> None:
        super().__init__("torch_dist", 1)
        self._copy, self._agree = copy, agree
        self.reached = False
        self._state: dict[str, Any] = {}

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        self.reached = True
        self._agree()
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        if self._copy:
            for part in (part for parts in state.values() for part in parts if isinstance(part, ShardedTensor)):
                if not part.key.startswith(OPTIMIZER):  # whose state has been gathered into memory of its own
                    part.data = part.data.detach().to("cpu", copy=True)
        self._state = mcore_to_pyt_state_dict(state, False)
        return AsyncRequest(None, (), [])

    def write(self, directory: Path, group: dist.ProcessGroup) -> None:
        files = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        save_sharded(self._state, storage_writer=files, planner=planner, process_group=group)
        self._state = {}


class Saver:
    """Writes checkpoints, one after another. background: from a copy, on a thread of its own, while training goes on.

    Constructing and using it are collective.
    """

    def __init__(self, background: bool) -> None:
        self._background = background
        # What this sends must not meet the messages of the training that goes on.
        self.group = dist.new_group(backend="gloo", timeout=FILES_TIMEOUT)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last = _done(lambda: None)

    def save(
        self,
        directory: Path,
        chunks: Sequence[PolicyModel],
        trainable: Trainable,
        architecture: Architecture,
        model: Path,
    ) -> Future[None]:
        """Write the state as it is now into an existing empty folder, with the small files of folder `model`; first
        wait for the one before to end, because both speak over one group.

        The future ends when all of it is on disk, or with OSError when that cannot be.
        """
        wait([self._last])
        begin = self._thread.submit if self._background else _done
        try:
            writer = self._prepare(directory, chunks, trainable)
        except OSError as error:  # of every rank
            self._last = _failed(error)
        else:
            self._last = begin(self._complete, directory, writer, _random_states(), architecture, model)
        return self._last

    def _prepare(self, directory: Path, chunks: Sequence[PolicyModel], trainable: Trainable) -> Writer:
        writer = Writer(self._background, agree=self._agree)
        with cpu.device_literals():
            state = _sharded_state(chunks, trainable, is_loading=False)
            try:
                dist_checkpointing.save(state, str(directory), sharded_strategy=writer, async_sharded_save=True)
            except Exception as error:  # the other ranks wait to hear of it, whatever it is
                if not writer.reached:
                    self._agree(_reason(error))
                raise
        return writer

    def _complete(
        self, directory: Path, writer: Writer, randoms: dict[str, Any], architecture: Architecture, model: Path
    ) -> None:
        """Files of all ranks first, then what makes a checkpoint of them."""
        with self._together():
            writer.write(directory, self.group)
            torch.save(randoms, _random_file(directory))
        with self._together():
            if dist.get_rank() == 0:
                save_config(CheckpointingConfig(writer.backend, writer.version), str(directory))
                manifest.seal(directory, architecture, model)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What fails on one rank fails on all of them, as an OSError."""
        error: str | None = None
        try:
            yield
        except (Exception, CheckpointException) as caught:  # whatever it is, the other ranks wait to hear of it
            error = _reason(caught)
        self._agree(error)

    def _agree(self, error: str | None = None) -> None:
        """Raises OSError on every rank when any has an error."""
        errors: list[str | None] = [error] * dist.get_world_size()
        if len(errors) > 1:
            dist.all_gather_object(errors, error, group=self.group)
        if found := [each for each in errors if each]:
            raise OSError(found[0])


def restore(
    directory: Path,
    chunks: Sequence[PolicyModel],
    trainable: Trainable,
    architecture: Architecture,
    group: dist.ProcessGroup,
) -> None:
    """Load a checkpoint. Raises ValueError naming the folder and what is wrong, before anything has changed.

    group: of all ranks, over which they may wait as long as files are read.
    """
    ranks = _check(directory, architecture, group).ranks
    with cpu.device_literals():
        loaded = dist_checkpointing.load(_sharded_state(chunks, trainable, is_loading=True), str(directory))
        for index, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded[f"model{index}"])
        _load_optimizer(trainable, loaded)
    trainable.scheduler.num_steps = loaded["schedule"]["num_steps"]
    trainable.scheduler.step(0)
    if ranks == dist.get_world_size():
        _load_random(directory)


def _sharded_state(chunks: Sequence[PolicyModel], trainable: Trainable, is_loading: bool) -> dict[str, Any]:
    weights = {f"model{index}": chunk.sharded_state_dict(metadata=dict(METADATA)) for index, chunk in enumerate(chunks)}
    for part in trainable.parts():
        _ensure_moments(part.optimizer)
    steps = max(cpu.steps_taken(part.optimizer) for part in trainable.parts())
    with _padding_kept(trainable):
        state = trainable.optimizer.sharded_state_dict(weights, is_loading, metadata=dict(METADATA))
    for part in trainable.parts():
        # Megatron hands torch's Adam one count for all its parameters here.
        cpu.set_steps_taken(part.optimizer, steps)
    schedule = {"num_steps": trainable.scheduler.num_steps, "optimizer_steps": steps}
    return {**weights, "optimizer": state, "schedule": schedule}


@contextmanager
def _padding_kept(trainable: Trainable) -> Iterator[None]:
    """Megatron leaves the padding between buckets out of what it gathers here, yet finds each parameter in it by a
    position that counts the padding: behind a padded bucket, moments and masters would be those of a neighbour. Inside,
    no element counts as padding."""
    owners = [owner for each in trainable.ddp for owner in (*each.buffers, *each.expert_parallel_buffers)]
    sizes = [(owner, owner.numel) for owner in owners]
    sizes += [(bucket, bucket.grad_data.numel()) for owner in owners for bucket in owner.buckets]
    before = [owner.numel_unpadded for owner, _ in sizes]
    try:
        for owner, size in sizes:
            owner.numel_unpadded = size
        yield
    finally:
        for (owner, _), size in zip(sizes, before, strict=True):
            owner.numel_unpadded = size


def _ensure_moments(optimizer: torch.optim.Optimizer) -> None:
    """Adam's state before its first step, which Megatron expects to exist."""
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        state = optimizer.state[parameter]
        if not state and getattr(optimizer, "master_weights", False):
            # Transformer Engine's, which keeps the masters too and knows the precision of each.
            optimizer.initialize_state(parameter, False)  # type: ignore[attr-defined]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter.data)
        if cpu.active() and "step" not in state:
            state["step"] = torch.tensor(0.0)


def _load_optimizer(trainable: Trainable, loaded: dict[str, Any]) -> None:
    """Masters and moments. Rates and decays come from this run's configuration and schedule."""
    states = loaded["optimizer"]
    for index, part in enumerate(trainable.parts()):
        cpu.hide_steps_taken(part.optimizer)
        state = states if "param_state" in states else states[index]
        part.load_parameter_state_from_fully_reshardable(state["param_state"])
        cpu.set_steps_taken(part.optimizer, loaded["schedule"]["optimizer_steps"])


def _random_file(directory: Path) -> Path:
    return directory / f"random_{dist.get_rank()}.pt"


def _random_states() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": None if cpu.active() else torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
    }


def _load_random(directory: Path) -> None:
    states = torch.load(_random_file(directory), weights_only=True)
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and not cpu.active():
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])


def _check(directory: Path, architecture: Architecture, group: dist.ProcessGroup) -> Manifest:
    """The manifest, when it fits this model and every file fits it. Each rank reads its share of the files."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: Manifest | None = None
    verdicts: list[str | None] = [None] * ranks
    try:
        found = manifest.checked(directory, architecture, slice(rank, None, ranks))
    except ValueError as error:
        verdicts[rank] = str(error)
    dist.all_gather_object(verdicts, verdicts[rank], group=group)
    if problems := [each for each in verdicts if each]:
        raise ValueError(problems[0])
    assert found is not None
    return found


def _reason(error: BaseException) -> str:
    """The last line, which follows the tracebacks of other ranks."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else repr(error)


def _done(work: Callable[..., None], *arguments: Any) -> Future[None]:
    """The future of work that is done when this returns."""
    try:
        work(*arguments)
    except OSError as error:
        return _failed(error)
    future = Future[None]()
    future.set_result(None)
    return future


def _failed(error: OSError) -> Future[None]:
    future = Future[None]()
    future.set_exception(error)
    return future
