"""A look at a run through its Redis: services, queues, dead letters, the trainer's own word."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from trireme.launch.health import trainer_status
from trireme.registry import Registry, ServiceRecord
from trireme.streams.base import Stream
from trireme.streams.redis import RedisStreams

PATIENCE_S = 3.0  # a person waits for the answer
REASONS_SHOWN = 3


@dataclass(frozen=True)
class Queue:
    """depth: entries waiting or leased; leased: of these, how many are in work. oldest_age_s: None when empty."""

    name: str
    depth: int
    leased: int
    oldest_age_s: float | None


@dataclass(frozen=True)
class Trainer:
    """What the trainer says of itself."""

    step: int
    max_steps: int
    weight_version: int
    phase: str
    groups_in_flight: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment. dead_letters: how many entries were given up, with the first few reasons."""

    run: str
    services: list[ServiceRecord]
    queues: list[Queue]
    dead_letters: int
    dead_reasons: list[str]
    trainer: Trainer | None
    taken_unix_s: float = field(default_factory=time.time)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def look(redis_url: str, run: str) -> Snapshot:
    """Raises StreamsError when Redis does not answer within PATIENCE_S."""
    async with RedisStreams(redis_url, run, connect_timeout_s=PATIENCE_S, patience_s=PATIENCE_S) as streams:
        services = await Registry(streams.client, run).list()
        return Snapshot(
            run=run,
            services=services,
            queues=[await _queue(stream) for stream in streams.streams],
            dead_letters=await streams.dead.depth(),
            dead_reasons=await _reasons(streams),
            trainer=_trainer(services),
        )


async def _queue(stream: Stream) -> Queue:
    return Queue(stream.name, await stream.depth(), await stream.pending(), await stream.oldest_age_s())


async def _reasons(streams: RedisStreams) -> list[str]:
    return [f"{letter.source}: {letter.reason}" for letter in await streams.dead.read(count=REASONS_SHOWN)]


def _trainer(services: list[ServiceRecord]) -> Trainer | None:
    address = next((service.address for service in services if service.kind == "trainer"), None)
    status = trainer_status(address) if address else None
    if status is None:
        return None
    return Trainer(
        step=int(status.step),
        max_steps=int(status.max_steps),
        weight_version=int(status.weight_version),
        phase=status.phase,
        groups_in_flight=int(status.groups_in_flight),
        metrics=dict(status.metrics),
    )
