"""The collector against a real Redis, with a stand-in for the rollout and reward services between its streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.trainer.collecting import Collector, DataExhausted, StarvedError
from services.trainer.data import Item, PreparedPrompt, Task
from trireme.config import Config, load_config
from trireme.contracts import rewards
from trireme.contracts.ids import sample_id
from trireme.contracts.v1 import sample_pb2
from trireme.streams.redis import RedisStreams
from trireme.tasks import end

GROUPS, SIZE = 2, 3


class Numbered:
    """A prompt source that counts; prompt i has token i. `limit`: how many there are."""

    def __init__(self, limit: int = 10**6) -> None:
        self.position, self.limit = 0, limit

    def next(self, count: int) -> list[PreparedPrompt]:
        numbers = range(self.position, min(self.limit, self.position + count))
        self.position += len(numbers)
        item = Item([{"role": "user", "content": "?"}], Task("exact", {"answer": "1"}), 0)
        return [PreparedPrompt([number], str(number), item, number, 0) for number in numbers]

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def restore(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def config(tmp_path: Path, *overrides: str) -> Config:
    text = {
        "grpo": {"num_prompts_per_step": GROUPS, "num_generations_per_prompt": SIZE, "max_num_steps": 10},
        "policy": {
            "model_name": "none",
            "train_global_batch_size": GROUPS * SIZE,
            "megatron_cfg": {"enabled": True},
            "max_total_sequence_length": 64,
            "generation": {"max_new_tokens": 8},
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "data": {"dataset_name": "reasoning_gym/chain_sum"},
        "trainer": {"refill_timeout_s": 2.0},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(text))
    return load_config(path, overrides)


@asynccontextmanager
async def streams(url: str, run: str) -> AsyncIterator[RedisStreams]:
    async with RedisStreams(url, run) as opened:
        yield opened


def scored(prompt: sample_pb2.Prompt, index: int, version: int, reward: float) -> sample_pb2.Sample:
    return sample_pb2.Sample(
        id=sample_id(prompt.group_id, index),
        group_id=prompt.group_id,
        group_index=index,
        group_size=prompt.num_samples,
        prompt_token_ids=prompt.token_ids,
        response_token_ids=[5, 6],
        log_probs=[-0.5, -0.5],
        versions=[sample_pb2.VersionSpan(start=0, length=2, version=version)],
        loss_spans=[sample_pb2.Span(start=0, length=2)],
        finish_reason=sample_pb2.FINISH_REASON_STOP,
        temperature=1.0,
        admitted_version=prompt.admitted_version,
        reward=rewards.score(reward, verifier="exact"),
    )


@asynccontextmanager
async def serving(
    opened: RedisStreams, version: Callable[[], int], reward: Callable[[sample_pb2.Prompt, int], float]
) -> AsyncIterator[list[int]]:
    """Answers every prompt with scored samples, each of them twice; yields the prompts' numbers as they come."""
    seen: list[int] = []

    async def work() -> None:
        while True:
            for entry in await opened.prompts.take(10, 0.1):
                prompt = sample_pb2.Prompt.FromString(entry.data)
                seen.append(prompt.token_ids[0])
                for index in [*range(SIZE), *range(SIZE)]:
                    sample = scored(prompt, index, version(), reward(prompt, index))
                    await opened.scored.put(sample.SerializeToString())
                await opened.prompts.done([entry.id])

    task = asyncio.create_task(work())
    try:
        yield seen
    finally:
        await end(task)


def collector(settings: Config, opened: RedisStreams, source: Numbered, steps_left: int = 10) -> Collector:
    return Collector(settings, source, opened, lambda: steps_left)


async def test_on_policy_admits_exactly_a_step(tmp_path: Path, redis_url: str, run_name: str) -> None:
    version = 1
    async with streams(redis_url, run_name) as opened, serving(opened, lambda: version, lambda *_: 1.0) as seen:
        collecting = collector(config(tmp_path), opened, Numbered())
        groups = await collecting.collect(1)
        assert [group.usable for group in groups] == [SIZE] * GROUPS
        assert sorted(seen) == [0, 1] and not collecting.pending
        version = 2
        groups = await collecting.collect(2)
        assert sorted(group.samples[0].prompt_token_ids[0] for group in groups) == [2, 3]


async def test_one_step_off_keeps_a_second_step_in_flight(tmp_path: Path, redis_url: str, run_name: str) -> None:
    settings = config(
        tmp_path, "grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true",
    )  # fmt: skip
    async with streams(redis_url, run_name) as opened:
        collecting = collector(settings, opened, Numbered())
        await collecting.admit(1)
        assert len(collecting.pending) == 2 * GROUPS
        async with serving(opened, lambda: 1, lambda *_: 1.0):
            await collecting.collect(1)
            assert len(collecting.pending) == GROUPS


async def test_stale_groups_are_dropped_and_replaced(tmp_path: Path, redis_url: str, run_name: str) -> None:
    """The staleness bound is hard: samples of version 1 never update version 2 when the bound is 0."""
    version = 1
    async with streams(redis_url, run_name) as opened:
        collecting = collector(config(tmp_path), opened, Numbered())
        async with serving(opened, lambda: version, lambda *_: 1.0) as seen:
            await collecting.admit(1)
            while len(seen) < GROUPS:
                await asyncio.sleep(0.05)
            version = 2
            groups = await collecting.collect(2)
            assert {group.oldest_version for group in groups} == {2}
            assert collecting.assembler.counters["stale_groups"] == GROUPS
            assert sorted(seen) == [0, 1, 2, 3]


async def test_dynamic_sampling_replaces_groups_without_signal(tmp_path: Path, redis_url: str, run_name: str) -> None:
    """R-30: prompts 0 and 1 are answered equally well by every sample; the step is made of 2 and 3."""
    settings = config(tmp_path, "grpo.use_dynamic_sampling=true")
    reward = lambda prompt, index: float(prompt.token_ids[0] < 2 or index == 0)  # noqa: E731
    async with streams(redis_url, run_name) as opened, serving(opened, lambda: 1, reward):
        groups = await collector(settings, opened, Numbered()).collect(1)
        assert sorted(group.samples[0].prompt_token_ids[0] for group in groups) == [2, 3]


async def test_dynamic_sampling_is_bounded(tmp_path: Path, redis_url: str, run_name: str) -> None:
    settings = config(tmp_path, "grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=3")
    async with streams(redis_url, run_name) as opened, serving(opened, lambda: 1, lambda *_: 1.0) as seen:
        groups = await collector(settings, opened, Numbered()).collect(1)
        assert len(groups) == GROUPS and len(seen) == 3 * GROUPS


async def test_servers_stuck_on_old_weights_end_the_run(tmp_path: Path, redis_url: str, run_name: str) -> None:
    async with streams(redis_url, run_name) as opened, serving(opened, lambda: 1, lambda *_: 1.0):
        with pytest.raises(StarvedError, match=r"could not be used.*stale \(sampled by version 1 for version 2"):
            await collector(config(tmp_path), opened, Numbered()).collect(2)


async def test_end_of_data(tmp_path: Path, redis_url: str, run_name: str) -> None:
    async with streams(redis_url, run_name) as opened, serving(opened, lambda: 1, lambda *_: 1.0):
        collecting = collector(config(tmp_path), opened, Numbered(limit=GROUPS + 1))
        await collecting.collect(1)
        with pytest.raises(DataExhausted, match="1 prompts are left"):
            await collecting.collect(2)


async def test_starvation_says_where_it_hangs(tmp_path: Path, redis_url: str, run_name: str) -> None:
    async with streams(redis_url, run_name) as opened:
        with pytest.raises(StarvedError, match=r"2 groups in flight, 2 prompts and 0 scored samples.*logs/rollout"):
            await collector(config(tmp_path), opened, Numbered()).collect(1)


async def test_a_broken_entry_is_a_dead_letter_and_stops_nothing(tmp_path: Path, redis_url: str, run_name: str) -> None:
    async with streams(redis_url, run_name) as opened, serving(opened, lambda: 1, lambda *_: 1.0):
        await opened.scored.put(b"\xff not a sample")
        assert len(await collector(config(tmp_path), opened, Numbered()).collect(1)) == GROUPS
        assert [letter.source for letter in await opened.dead.read()] == ["scored"]


async def test_what_others_gave_up_fills_its_place(tmp_path: Path, redis_url: str, run_name: str) -> None:
    """R-28, Q-12: a dead prompt's group is replaced; of a group with one dead sample the others are used."""
    async with streams(redis_url, run_name) as opened:
        collecting = collector(config(tmp_path), opened, Numbered())
        await collecting.admit(1)
        first, second = await opened.prompts.take(2, 1.0)
        await opened.prompts.dead_letter(first, "delivered 3 times")
        prompt = sample_pb2.Prompt.FromString(second.data)
        await opened.samples.put(scored(prompt, 0, 1, 0.0).SerializeToString())
        await opened.samples.dead_letter((await opened.samples.take(1, 1.0))[0], "no verifier")
        for index in (1, 2):
            await opened.scored.put(scored(prompt, index, 1, 1.0).SerializeToString())
        await opened.prompts.done([second.id])
        async with serving(opened, lambda: 1, lambda *_: 1.0):
            groups = await collecting.collect(1)
        assert sorted((group.samples[0].prompt_token_ids[0], group.usable) for group in groups) == [(1, 2), (2, 3)]


async def test_resume_admits_what_no_step_has_taken(tmp_path: Path, redis_url: str, run_name: str) -> None:
    """C-01, C-02: after a resume every prompt is trained on once, in spite of what the streams still held."""
    settings = config(tmp_path)
    async with streams(redis_url, run_name) as opened:
        async with serving(opened, lambda: 1, lambda *_: 1.0):
            first = collector(settings, opened, Numbered())
            taken = {group.samples[0].prompt_token_ids[0] for group in await first.collect(1)}
            await first.admit(2)
        state = json.loads(json.dumps(first.state()))
        assert len(state["pending"]) == GROUPS
        for stream in opened.streams:
            await stream.clear()
        second = collector(settings, opened, Numbered())
        await second.restore(state, 3)
        async with serving(opened, lambda: 3, lambda *_: 1.0) as seen:
            taken |= {group.samples[0].prompt_token_ids[0] for group in await second.collect(3)}
        assert sorted(seen) == [2, 3]
    assert taken == {0, 1, 2, 3}


async def test_dead_letters_of_an_earlier_life_are_not_ours(tmp_path: Path, redis_url: str, run_name: str) -> None:
    """Group ids repeat when a run is taken up again from an older checkpoint; what was given up then may work now."""
    async with streams(redis_url, run_name) as opened:
        first = collector(config(tmp_path), opened, Numbered())
        await first.admit(1)
        for entry in await opened.prompts.take(10, 0.5):
            await opened.prompts.dead_letter(entry, "the engine died")
        again = collector(config(tmp_path), opened, Numbered())
        async with serving(opened, lambda: 1, lambda *_: 1.0):
            groups = await again.collect(1)
        assert [group.usable for group in groups] == [SIZE] * GROUPS


async def test_a_sample_with_an_impossible_place_stops_nothing(tmp_path: Path, redis_url: str, run_name: str) -> None:
    """It becomes a dead letter, and reading that letter back does not end the run either."""
    async with streams(redis_url, run_name) as opened:
        collecting = collector(config(tmp_path), opened, Numbered())
        await collecting.admit(1)
        prompt = next(iter(collecting.pending.values()))
        wrong = scored(prompt, 0, 1, 1.0)
        wrong.group_index = 9
        await opened.scored.put(wrong.SerializeToString())
        async with serving(opened, lambda: 1, lambda *_: 1.0):
            groups = await collecting.collect(1)
        assert [group.usable for group in groups] == [SIZE] * GROUPS
        assert await opened.dead.depth() == 1


async def test_unusable_groups_are_blamed_on_what_befell_them(tmp_path: Path, redis_url: str, run_name: str) -> None:
    async with streams(redis_url, run_name) as opened:
        collecting = collector(config(tmp_path), opened, Numbered())

        async def fail() -> None:
            while True:
                for entry in await opened.prompts.take(10, 0.1):
                    prompt = sample_pb2.Prompt.FromString(entry.data)
                    for index in range(SIZE):
                        sample = scored(prompt, index, 1, 0.0)
                        sample.reward.CopyFrom(rewards.infrastructure_failure("the judge is away", 3, verifier="exact"))
                        await opened.scored.put(sample.SerializeToString())
                    await opened.prompts.done([entry.id])

        task = asyncio.create_task(fail())
        with pytest.raises(StarvedError, match=r"could not be used.*the judge is away.*reward logs"):
            await collecting.collect(1)
        await end(task)


async def test_a_drain_during_admission_loses_no_prompt(tmp_path: Path, redis_url: str, run_name: str) -> None:
    """C-01: what the source has dealt is in the checkpoint, put into the stream or not."""
    async with streams(redis_url, run_name) as opened:
        collecting = collector(config(tmp_path), opened, Numbered())
        task = asyncio.create_task(collecting.admit(1))
        for _ in range(3):  # in the middle of its calls to Redis
            await asyncio.sleep(0)
        await end(task)
        state = collecting.state()
        assert len(state["pending"]) == state["source"]["position"] == state["serial"] == GROUPS
