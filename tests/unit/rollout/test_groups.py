"""Prompts at the door, seeds, and groups as a whole."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest

from services.rollout import groups
from services.rollout.engine import EngineError
from tests.unit.rollout.fakes import CountingEngine
from trireme.contracts.v1.rollout_pb2 import TokenDelta
from trireme.contracts.v1.sample_pb2 import Prompt, PromptRef, Sample, SamplingParams, Task


def prompt(**changes: object) -> Prompt:
    fields: dict[str, object] = {
        "group_id": "g",
        "num_samples": 3,
        "token_ids": [1, 2],
        "text": "hello",
        "sampling": SamplingParams(temperature=1, max_new_tokens=4, seed=9),
        "ref": PromptRef(dataset="d", index=5),
        "task": Task(verifier="v", payload_json="{}"),
        "trace_id": "t",
        "admitted_version": 2,
    }
    return Prompt(**{**fields, **changes})  # type: ignore[arg-type]


def sampling(**changes: object) -> Callable[[Prompt], None]:
    return lambda p: [setattr(p.sampling, k, v) for k, v in changes.items()] and None  # type: ignore[func-returns-value]


def test_seeds_differ_within_a_group_and_between_groups() -> None:
    """P-08, P-09: also in the lower 32 bits, which is all that PyTorch's CPU generator uses."""
    seeds = [groups.seed_of(group, index) for group in range(100) for index in range(64)]
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert groups.seed_of(2**64 - 1, 3) != groups.seed_of(2**63 - 1, 3)


def test_seeds_are_the_same_in_every_process_and_release() -> None:
    """P-08: a run must be repeatable; these values may never change."""
    assert [groups.seed_of(42, i) for i in range(2)] == [SEED_42_0, SEED_42_1]


# blake2b-64 of "42/0" and "42/1", shifted right by one: coreutils' `printf 42/0 | b2sum -l 64`.
SEED_42_0 = 0x4EB9C58CBF226A00 >> 1
SEED_42_1 = 0xD9C3D61DF9A4E9D9 >> 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.ClearField("group_id"), "group_id is empty"),
        (lambda p: p.ClearField("num_samples"), "num_samples is 0"),
        (lambda p: p.ClearField("token_ids"), "token_ids is empty"),
        (lambda p: p.token_ids.extend([1] * 14), "token_ids has 16 tokens, and max_model_len 16"),
        (lambda p: p.token_ids.append(100), "token_ids contains 100, the vocabulary has 100"),
        (sampling(max_new_tokens=0), "max_new_tokens is 0"),
        (lambda p: p.sampling.ClearField("temperature"), "temperature is not set"),
        (sampling(temperature=-1), "temperature is -1"),
        (sampling(temperature=0.001), "temperature is 0.001"),
        (sampling(temperature=math.nan), "temperature is nan"),
        (sampling(top_p=1.5), "top_p is 1.5"),
        (lambda p: p.sampling.stop_strings.append(""), "stop_strings contains an empty string"),
    ],
)
def test_a_prompt_that_cannot_be_generated_is_refused_by_field(change: Callable[[Prompt], None], message: str) -> None:
    """P-04 and T-10 among them: no temperature is bent, no prompt is cut."""
    bad = prompt()
    groups.check(bad, CountingEngine())
    change(bad)
    with pytest.raises(groups.InvalidPrompt, match=message):
        groups.check(bad, CountingEngine())


async def test_a_group_is_its_samples_with_everything_the_prompt_said() -> None:
    engine = CountingEngine()
    engine.version = 7
    made = [s async for s in groups.generate(engine, prompt(), "server-1") if isinstance(s, Sample)]
    assert sorted(s.id for s in made) == ["g/0", "g/1", "g/2"]
    one = min(made, key=lambda s: s.group_index)
    assert (one.group_size, one.rollout_server, one.admitted_version, one.temperature) == (3, "server-1", 2, 1)
    assert list(one.prompt_token_ids) == [1, 2] and list(one.response_token_ids) == [3, 4, 5, 6]
    assert [(s.start, s.length, s.version) for s in one.versions] == [(0, 4, 7)]
    assert [(s.start, s.length) for s in one.loss_spans] == [(0, 4)]
    assert (one.ref.index, one.task.verifier, one.trace_id, one.prompt_text) == (5, "v", "t", "hello")
    assert len({r.seed for r in engine.started}) == 3


async def test_deltas_come_only_when_asked_for() -> None:
    engine = CountingEngine()
    events = [e async for e in groups.generate(engine, prompt(), "s", stream=True)]
    assert sum(isinstance(e, TokenDelta) for e in events) == 3
    assert sum(isinstance(e, Sample) for e in events) == 3


async def test_one_failing_sample_fails_the_group_and_stops_the_rest() -> None:
    engine = CountingEngine()
    with pytest.raises(EngineError, match="thirteen"):
        async for _ in groups.generate(engine, prompt(token_ids=[13]), "s"):
            pass


async def test_closing_the_iterator_aborts_every_sample() -> None:
    engine = CountingEngine()
    engine.release.clear()
    consuming = asyncio.create_task(anext(groups.generate(engine, prompt(), "s")))
    while len(engine.started) < 3:
        await asyncio.sleep(0.001)
    consuming.cancel()
    await asyncio.gather(consuming, return_exceptions=True)
    assert sorted(engine.aborted) == sorted(r.id for r in engine.started)


@pytest.mark.parametrize("value", [math.nan, -math.inf, 0.5])
async def test_a_log_prob_that_is_none_never_leaves(value: float) -> None:
    """P-13."""
    engine = CountingEngine()
    engine.log_prob = value
    with pytest.raises(EngineError, match=r"sample g/\d: log_probs: is"):
        async for _ in groups.generate(engine, prompt(), "s"):
            pass
