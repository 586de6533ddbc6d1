"""The order of weight updates: once each, never back, never two at a time, and out of rotation after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.rollout import updates
from services.rollout.engine import WeightLoadError
from services.rollout.updates import NotCaughtUp, StaleVersion, UpdateFailed, WeightKeeper
from tests.unit.rollout.fakes import CountingEngine
from trireme.contracts.v1.weights_pb2 import WeightManifest
from trireme.weights.manifest import build
from trireme.weights.shm import ShmTransport

RUN = "updates"


class Publisher:
    """Offers versions in a folder, as a trainer does."""

    def __init__(self, directory: Path) -> None:
        self.transport = ShmTransport(RUN, directory=directory)

    def offer(self, version: int, run: str = RUN) -> WeightManifest:
        tensors = [("w", torch.full((3,), float(version)))]
        manifest = self.transport.offer(build(version, RUN, tensors), tensors)
        manifest.run = run
        return manifest


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    made = Publisher(tmp_path)
    yield made
    made.transport.close()


def keeper_of(engine: CountingEngine, publisher: Publisher) -> WeightKeeper:
    return WeightKeeper(engine, publisher.transport, RUN, timeout_s=5)


async def test_the_same_version_again_is_answered_without_loading(publisher: Publisher) -> None:
    engine = CountingEngine()
    keeper, manifest = keeper_of(engine, publisher), publisher.offer(1)
    first = await keeper.update(manifest, in_flight=False)
    again = await keeper.update(manifest, in_flight=False)
    assert (first.version, again.version, again.load_s) == (1, 1, 0.0)
    assert engine.loads == [1]


async def test_two_callers_at_once_share_one_load(publisher: Publisher) -> None:
    engine = CountingEngine()
    keeper, manifest = keeper_of(engine, publisher), publisher.offer(1)
    done = await asyncio.gather(*(keeper.update(manifest, in_flight=False) for _ in range(5)))
    assert {d.version for d in done} == {1} and engine.loads == [1]


async def test_different_versions_at_once_run_one_after_the_other(publisher: Publisher) -> None:
    """P-13: never two loads at a time, and never back."""
    engine = CountingEngine()
    keeper = keeper_of(engine, publisher)
    one, two = publisher.offer(1), publisher.offer(2)
    await asyncio.gather(keeper.update(one, in_flight=False), keeper.update(two, in_flight=False))
    assert engine.loads == [1, 2]
    with pytest.raises(StaleVersion, match="version 1 is older than version 2"):
        await keeper.update(one, in_flight=False)


async def test_an_older_version_that_waited_behind_a_newer_one_is_refused(publisher: Publisher) -> None:
    engine = CountingEngine()
    keeper = keeper_of(engine, publisher)
    one, two = publisher.offer(1), publisher.offer(2)
    results = await asyncio.gather(
        keeper.update(two, in_flight=False), keeper.update(one, in_flight=False), return_exceptions=True
    )
    assert isinstance(results[1], StaleVersion) and engine.loads == [2]


async def test_a_caller_that_gives_up_does_not_stop_the_update(publisher: Publisher) -> None:
    engine = CountingEngine()
    keeper = keeper_of(engine, publisher)
    calling = asyncio.create_task(keeper.update(publisher.offer(1), in_flight=False))
    await asyncio.sleep(0.005)
    calling.cancel()
    await keeper.wait_for(1, 2)
    assert engine.loads == [1]


async def test_a_failed_load_takes_it_out_of_rotation_until_one_succeeds(publisher: Publisher) -> None:
    engine = CountingEngine()
    keeper = keeper_of(engine, publisher)
    engine.fail_load = WeightLoadError("broken", intact=False)
    with pytest.raises(UpdateFailed, match="version 1: broken"):
        await keeper.update(publisher.offer(1), in_flight=False)
    assert not keeper.serving and keeper.problem == "weight version 1: broken"
    with pytest.raises(NotCaughtUp, match=r"demands weight version 0, this server has 0 \(weight version 1: broken\)"):
        await keeper.wait_for(0, 0.05)
    engine.fail_load = None
    await keeper.update(publisher.offer(2), in_flight=False)
    assert keeper.serving and keeper.version == 2


async def test_bytes_that_cannot_be_fetched_take_it_out_of_rotation_when_somebody_asked(publisher: Publisher) -> None:
    keeper, manifest = keeper_of(CountingEngine(), publisher), publisher.offer(1)
    publisher.transport.withdraw(1)
    with pytest.raises(UpdateFailed, match="gone"):
        await keeper.update(manifest, in_flight=False)
    assert not keeper.serving


async def test_the_manifest_of_a_trainer_that_is_gone_leaves_it_healthy_but_behind(publisher: Publisher) -> None:
    """A resumed run: its new trainer waits for this server to be healthy before it publishes."""
    keeper, manifest = keeper_of(CountingEngine(), publisher), publisher.offer(9)
    publisher.transport.withdraw(9)

    async def registry() -> bytes:
        return manifest.SerializeToString()

    with pytest.raises(UpdateFailed, match="gone"):
        await keeper.catch_up(registry)
    assert keeper.serving and keeper.behind
    await keeper.update(publisher.offer(10), in_flight=False)
    assert keeper.serving and not keeper.behind


async def test_it_catches_up_by_itself(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure, and for a version that it was never told of."""
    monkeypatch.setattr(updates, "CATCH_UP_EVERY_S", 0.02)
    engine = CountingEngine()
    keeper, newest = keeper_of(engine, publisher), publisher.offer(1)

    async def registry() -> bytes:
        return newest.SerializeToString()

    keeping = asyncio.create_task(keeper.keep_up(registry))
    await keeper.wait_for(1, 2)
    engine.fail_load = WeightLoadError("broken", intact=False)
    newest = publisher.offer(2)
    while keeper.serving:
        await asyncio.sleep(0.005)
    engine.fail_load = None
    await keeper.wait_for(2, 2)
    keeping.cancel()
    assert engine.loads == [1, 2] and keeper.serving


async def test_weights_of_another_run_are_refused(publisher: Publisher) -> None:
    keeper = keeper_of(CountingEngine(), publisher)
    with pytest.raises(ValueError, match="manifest.run is 'other'; this server belongs to run 'updates'"):
        await keeper.update(publisher.offer(1, run="other"), in_flight=False)
    assert keeper.serving


async def test_waiting_ends_with_the_deadline_and_says_what_is_there(publisher: Publisher) -> None:
    keeper = keeper_of(CountingEngine(), publisher)
    with pytest.raises(NotCaughtUp, match="demands weight version 3, this server has 0"):
        await keeper.wait_for(3, 0.02)
