"""Nothing lost, nothing doubled, when consumers are killed in the middle: real processes, kill -9, real Redis."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from trireme.streams import RedisStreams

STAGE = Path(__file__).with_name("stage.py")
REPOSITORY = Path(__file__).parents[3]


class Stages:
    """Stage processes, all of them ended with the test."""

    def __init__(self, url: str, run: str) -> None:
        self._prefix = [sys.executable, str(STAGE), url, run]
        self._running: list[subprocess.Popen[str]] = []

    def start(self, source: str, target: str, fanout: int) -> subprocess.Popen[str]:
        command = [*self._prefix, source, target, str(fanout)]
        environment = {"PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self._running.append(process)
        return process

    def stop(self) -> None:
        for process in self._running:
            process.kill()
            process.communicate()


@pytest.fixture
def stages(redis_url: str, run_name: str) -> Iterator[Stages]:
    stages = Stages(redis_url, run_name)
    yield stages
    stages.stop()


def kill_at_work(process: subprocess.Popen[str]) -> None:
    """SIGKILL just after the process has taken entries."""
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    process.send_signal(signal.SIGKILL)
    process.wait(5)


async def collect(streams: RedisStreams, expected: int, within_s: float = 60) -> Counter[bytes]:
    """What comes out, until `expected` different ones did and nothing is left before."""
    seen: Counter[bytes] = Counter()
    async with asyncio.timeout(within_s):
        while len(seen) < expected or await streams.prompts.depth() or await streams.samples.depth():
            entries = await streams.scored.take(100, block_s=0.2)
            seen.update(entry.data for entry in entries)
            await streams.scored.done([entry.id for entry in entries])
    return seen


async def test_another_takes_over_from_a_killed_consumer(redis_url: str, run_name: str, stages: Stages) -> None:
    """Q-12 at the level of the queue, for one hop: each entry comes out once."""
    async with RedisStreams(redis_url, run_name) as streams:
        for number in range(60):
            await streams.prompts.put(b"%d" % number)
        victim = stages.start("prompts", "scored", 1)
        await asyncio.to_thread(kill_at_work, victim)
        left = await streams.prompts.pending()
        assert left > 0, "killed while it held entries"
        stages.start("prompts", "scored", 1)
        seen = await collect(streams, expected=60)
        assert seen == Counter(b"%d/0" % number for number in range(60))
        assert await streams.dead.depth() == 0


async def test_groups_stay_whole_while_every_stage_is_killed(redis_url: str, run_name: str, stages: Stages) -> None:
    """Q-12: two consumers at each of two hops, one of each killed at work: all members of all groups, once each."""
    async with RedisStreams(redis_url, run_name) as streams:
        first = [stages.start("prompts", "samples", 4) for _ in range(2)]
        second = [stages.start("samples", "scored", 1) for _ in range(2)]
        for number in range(25):
            await streams.prompts.put(b"%d" % number)
        await asyncio.gather(asyncio.to_thread(kill_at_work, first[0]), asyncio.to_thread(kill_at_work, second[0]))
        seen = await collect(streams, expected=100)
        assert seen == Counter(b"%d/%d/0" % (group, member) for group in range(25) for member in range(4))
        assert (await streams.prompts.pending(), await streams.samples.pending()) == (0, 0)
