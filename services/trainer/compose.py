"""Builds a trainer from its configuration: which parts there are, and in what order they come up."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from services.trainer.backends.base import Backend
from services.trainer.backends.megatron.export import export
from services.trainer.backends.megatron.settings import from_config
from services.trainer.checkpoints import Checkpoints
from services.trainer.collecting import Collector
from services.trainer.data import load_dataset, load_tokenizer
from services.trainer.data.sampler import PromptSampler
from services.trainer.learning import Learner
from services.trainer.loop import Parts, TrainingLoop
from services.trainer.objectives.build import build_objective
from services.trainer.prompts import validation_prompts
from services.trainer.publishing import Publisher
from services.trainer.ranks import Channel, Leader, follow
from services.trainer.recorders import JsonLines, build_recorders
from services.trainer.server import SERVICE_NAME, LoopState, TrainerServicer
from services.trainer.validation import Validator
from trireme.config import Config
from trireme.contracts.grpc import serve
from trireme.contracts.v1 import trainer_pb2_grpc, weights_pb2
from trireme.registry import LOCK_SLACK_S, LOCK_TTL_S, Registry, RunLocked, ServiceRecord
from trireme.streams.errors import StreamsError
from trireme.streams.redis import RedisStreams
from trireme.tasks import end
from trireme.telemetry.http import serve_http
from trireme.weights.base import Transport
from trireme.weights.choose import make_transport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

ANNOUNCE_S = 2.0
SCORING_SLACK_S = 30.0  # beside the attempts themselves: queueing in a busy reward server


async def lead(
    config: Config, name: str, backend: Backend, channel: Channel | None, compute: ThreadPoolExecutor
) -> None:
    """Rank 0: serve, and run the loop to its end. `channel` is None when there are no other ranks."""
    run_dir = Path(config.run.dir)
    state = LoopState(config.run.name, config.grpo.max_num_steps)
    leader = Leader(backend, channel) if channel is not None else None
    async with AsyncExitStack() as stack:
        if leader is not None:
            # On the thread that owns the backend: after whatever it is still at.
            stack.push_async_callback(asyncio.get_running_loop().run_in_executor, compute, leader.end)
        streams = await stack.enter_async_context(_streams(config))
        registry = Registry(streams.client, config.run.name)
        holder = f"{name}, process {os.getpid()} on {socket.gethostname()}"
        lost = await stack.enter_async_context(registry.lock(holder, wait_s=LOCK_TTL_S + LOCK_SLACK_S))
        servicer, address, metrics_address = await _serve(config, state, stack)
        transport = make_transport(config.weights.transport, config.run.name, address)
        servicer.transport = transport
        stack.callback(transport.close)
        record = functools.partial(_record, name, address, metrics_address, config, state)
        await stack.enter_async_context(_announced(registry, record))
        _drain_on_signals(state)
        for stream in streams.streams:  # the checkpoint is the truth, see `collecting`
            await stream.clear()
        parts = await _parts(config, run_dir, state, leader or backend, registry, streams, transport)
        for recorder in (*parts.recorders, parts.samples):
            stack.callback(recorder.close)
        await _while_locked(TrainingLoop(config, run_dir, state, parts, compute).run(), lost)


async def _while_locked(work: Coroutine[Any, Any, None], lost: asyncio.Event) -> None:
    """Run `work` to its end. Raises RunLocked as soon as the run's lock is lost: two trainers must not publish."""
    task, watch = asyncio.create_task(work), asyncio.create_task(lost.wait())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RunLocked("this trainer lost the lock of its run, so another one may have taken it over")
        await task
    finally:
        for pending in (task, watch):
            await end(pending)


def obey(config: Config, backend: Backend, channel: Channel, compute: ThreadPoolExecutor) -> None:
    """Every other rank: repeat what rank 0 calls."""
    # The terminal's or supervisor's signal is for rank 0, which ends the others in order.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    compute.submit(follow, backend, channel, build_objective(config.loss_fn)).result()


def _streams(config: Config) -> RedisStreams:
    return RedisStreams(
        config.redis.url or "",
        config.run.name,
        lease_s=config.stream.lease_s,
        max_deliveries=config.stream.max_deliveries,
        connect_timeout_s=config.redis.connect_timeout_s,
    )


async def _serve(config: Config, state: LoopState, stack: AsyncExitStack) -> tuple[TrainerServicer, str, str]:
    """gRPC and HTTP up; the servicer and the two addresses."""
    trainer = config.trainer
    servicer = TrainerServicer(state, config.weights.chunk_bytes)
    adder = trainer_pb2_grpc.add_TrainerServiceServicer_to_server
    server, port = await serve([(adder, servicer, SERVICE_NAME)], trainer.host, trainer.port)
    stack.push_async_callback(server.stop, 1.0)
    http, http_port = await serve_http(trainer.host, trainer.metrics_port, lambda: (True, {"phase": state.phase}))
    stack.push_async_callback(http.stop)
    return servicer, f"{trainer.reachable_host}:{port}", f"{trainer.reachable_host}:{http_port}"


async def _parts(
    config: Config,
    run_dir: Path,
    state: LoopState,
    backend: Backend,
    registry: Registry,
    streams: RedisStreams,
    transport: Transport,
) -> Parts:
    tokenizer = load_tokenizer(config.policy.tokenizer)
    sampler = PromptSampler(
        load_dataset(config.data, config.env, "train", config.grpo.seed),
        tokenizer,
        config.data,
        config.grpo.seed,
        max_epochs=config.grpo.max_num_epochs,
    )
    collector = Collector(config, sampler, streams, lambda: state.max_steps - state.step)
    return Parts(
        backend=backend,
        learner=Learner(config, backend, build_objective(config.loss_fn)),
        collector=collector,
        publisher=await _publisher(config, registry, transport),
        validator=_validator(config, tokenizer),
        checkpoints=_checkpoints(config),
        recorders=build_recorders(config, run_dir),
        samples=JsonLines(run_dir / "samples.jsonl"),
        registry=registry,
        servers_ready=functools.partial(_servers_ready, config, registry),
        export=_exporter(config),
    )


async def _publisher(config: Config, registry: Registry, transport: Transport) -> Publisher:
    """Counts on from what the run has published before, whoever published it."""
    data = await registry.get_manifest()
    return Publisher(
        config.run.name,
        registry,
        transport,
        version=weights_pb2.WeightManifest.FromString(data).version if data else 0,
        dtype=from_config(config).publish_dtype,
        timeout_s=config.weights.timeout_s,
        in_flight=config.grpo.async_grpo.in_flight_weight_updates,
    )


def _validator(config: Config, tokenizer: PreTrainedTokenizerBase) -> Validator | None:
    wanted = min(config.grpo.max_val_samples, config.data.num_validation)
    if wanted == 0:
        return None
    dataset = load_dataset(config.data, config.env, "validation", config.grpo.seed)
    sampler = PromptSampler(dataset, tokenizer, config.data, config.grpo.seed, max_epochs=1, shuffle=False)
    return Validator(
        validation_prompts(config, sampler.next(wanted)),
        concurrency=config.grpo.val_batch_size,
        generate_deadline_s=config.rollout.request_timeout_s,
        score_deadline_s=config.reward.timeout_s * config.reward.max_attempts + SCORING_SLACK_S,
        policy_failure_score=config.reward.policy_failure_score,
    )


def _checkpoints(config: Config) -> Checkpoints:
    settings = config.checkpointing
    return Checkpoints(
        Path(settings.checkpoint_dir), settings.keep_top_k, settings.ranked_by, settings.higher_is_better
    )


def _exporter(config: Config) -> Callable[[Iterable[tuple[str, Tensor]], Path], None]:
    source, dtype = Path(config.policy.model_name), from_config(config).dtype
    return lambda tensors, target: export(tensors, source, target, dtype)


async def _servers_ready(config: Config, registry: Registry) -> None:
    """Wait for a rollout and a reward server. Raises TimeoutError naming the kind that never came."""
    deadline = time.monotonic() + config.rollout.startup_timeout_s
    for kind in ("rollout", "reward"):
        while not await registry.list(kind):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no {kind} server registered within {config.rollout.startup_timeout_s:g} s"
                    " (rollout.startup_timeout_s); start one, or see its log"
                )
            await asyncio.sleep(0.2)


@asynccontextmanager
async def _announced(registry: Registry, record: Callable[[], ServiceRecord]) -> AsyncIterator[None]:
    """Keep the registry's record of this trainer fresh."""

    async def announce() -> None:
        while True:
            try:
                await registry.announce(record())
            except StreamsError as error:
                log.warning("cannot announce the trainer: %s", error)
            await asyncio.sleep(ANNOUNCE_S)

    task = asyncio.create_task(announce())
    try:
        yield
    finally:
        await end(task)
        with suppress(StreamsError):  # the record ends by itself
            await registry.withdraw(record())


def _record(name: str, address: str, metrics_address: str, config: Config, state: LoopState) -> ServiceRecord:
    return ServiceRecord(
        kind="trainer",
        name=name,
        address=address,
        metrics_address=metrics_address,
        pid=os.getpid(),
        weight_version=state.weight_version,
        state=state.phase,
        started_unix_s=STARTED_UNIX_S,
        model=config.policy.model_name,
    )


def _drain_on_signals(state: LoopState) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, state.drain.set)


STARTED_UNIX_S = time.time()
