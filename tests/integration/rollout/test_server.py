"""The service's two faces on a real engine: gRPC, and the prompt stream in a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
import torch

from services.rollout.server import SERVICE_NAME, RolloutServicer
from services.rollout.worker import Limits, RolloutWorker
from tests.integration.rollout.conftest import Bench
from tests.integration.rollout.generating import SHARED_PROMPT, TOLERANCE, group
from tests.integration.rollout.models import reference_log_probs
from trireme.contracts.grpc import channel, serve
from trireme.contracts.v1 import rollout_pb2, rollout_pb2_grpc
from trireme.contracts.v1.sample_pb2 import Prompt, Sample
from trireme.streams.redis import RedisStreams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

Stub = rollout_pb2_grpc.RolloutServiceStub


@asynccontextmanager
async def client(bench: Bench) -> AsyncIterator[Stub]:
    servicer = RolloutServicer(bench.engine, bench.keeper, "rollout-7", timeout_s=120)
    add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
    server, port = await serve([(add, servicer, SERVICE_NAME)], "127.0.0.1", 0)
    async with channel(f"127.0.0.1:{port}") as to:
        yield Stub(to)
    await server.stop(None)


async def generated(stub: Stub, prompt: Prompt, timeout: float = 120, **kwargs: bool) -> list[Sample]:
    call = stub.Generate(rollout_pb2.GenerateRequest(prompt=prompt, **kwargs), timeout=timeout)
    return [r.sample async for r in call if r.HasField("sample")]


def check_sample(bench: Bench, sample: Sample) -> None:
    """Log-probs, as they travelled, are Hugging Face's under the weights that the engine has."""
    expected = reference_log_probs(bench.weights, list(sample.prompt_token_ids), list(sample.response_token_ids))
    assert float((torch.tensor(list(sample.log_probs)) - expected).abs().max()) < TOLERANCE


async def test_generate_over_grpc(tied: Bench) -> None:
    """End to end: a group of three, with what the engine sampled."""
    async with client(tied) as stub:
        made = await generated(stub, group(SHARED_PROMPT[:30], num_samples=3))
    assert sorted(s.group_index for s in made) == [0, 1, 2]
    assert {s.rollout_server for s in made} == {"rollout-7"}
    for sample in made:
        check_sample(tied, sample)


async def test_streamed_tokens_are_those_of_the_samples(tied: Bench) -> None:
    async with client(tied) as stub:
        request = rollout_pb2.GenerateRequest(prompt=group(SHARED_PROMPT[:30]), stream_tokens=True)
        deltas: dict[int, list[int]] = {0: [], 1: []}
        samples: dict[int, list[int]] = {}
        async for response in stub.Generate(request, timeout=120):
            if response.HasField("delta"):
                deltas[response.delta.group_index] += response.delta.token_ids
            else:
                samples[response.sample.group_index] = list(response.sample.response_token_ids)
    assert samples == deltas


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (group(SHARED_PROMPT * 2), "token_ids has 400 tokens, and max_model_len 320"),
        (group([301]), "token_ids contains 301"),
        (group([1], num_samples=0), "num_samples is 0"),
    ],
)
async def test_a_bad_prompt_is_an_invalid_argument(tied: Bench, prompt: Prompt, message: str) -> None:
    """T-10: a prompt that is too long is refused with both lengths, never cut."""
    async with client(tied) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generated(stub, prompt)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in (raised.value.details() or "")


async def test_a_cancelled_call_frees_the_engine(tied: Bench) -> None:
    """Q-11."""
    async with client(tied) as stub:
        long = group(SHARED_PROMPT[:30], num_samples=4, max_new_tokens=250, temperature=0.5)
        call = stub.Generate(rollout_pb2.GenerateRequest(prompt=long, stream_tokens=True), timeout=120)
        await call.read()
        call.cancel()
        deadline = time.monotonic() + 60
        while tied.engine._llm.get_num_unfinished_requests() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert tied.engine._llm.get_num_unfinished_requests() == 0
        assert len(await generated(stub, group([1, 2]))) == 2


async def test_update_over_grpc_is_idempotent_and_never_goes_back(tied: Bench) -> None:
    """P-17."""
    async with client(tied) as stub:
        older = tied.offer(tied.model.fresh(61))
        tied.weights = tied.model.fresh(62)
        request = rollout_pb2.UpdateWeightsRequest(manifest=tied.offer(tied.weights))
        first = await stub.UpdateWeights(request, timeout=120)
        again = await stub.UpdateWeights(request, timeout=120)
        assert first.version == again.version == request.manifest.version
        assert first.load_s > 0 and again.load_s == 0
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.UpdateWeights(rollout_pb2.UpdateWeightsRequest(manifest=older), timeout=120)
        assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        status = await stub.GetStatus(rollout_pb2.RolloutStatusRequest(), timeout=5)
        assert (status.name, status.weight_version) == ("rollout-7", first.version)
        for sample in await generated(stub, group(SHARED_PROMPT)):
            assert [s.version for s in sample.versions] == [first.version]
            check_sample(tied, sample)


async def test_a_prompt_may_demand_a_version(tied: Bench) -> None:
    """It waits for the update, or learns before its deadline that there was none."""
    async with client(tied) as stub:
        demanding = group([1, 2, 3], min_weight_version=tied.engine.version + 1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generated(stub, demanding, timeout=25)
        assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert f"demands weight version {demanding.min_weight_version}" in (raised.value.details() or "")
        waiting = asyncio.create_task(generated(stub, demanding, timeout=120))
        await asyncio.sleep(0.1)
        await tied.publish(seed=63)
        for sample in await waiting:
            assert [s.version for s in sample.versions] == [demanding.min_weight_version]


@asynccontextmanager
async def streams(redis_url: str, run: str) -> AsyncIterator[RedisStreams]:
    async with RedisStreams(redis_url, run, lease_s=5) as made:
        yield made


def worker_of(bench: Bench, at: RedisStreams, **limits: float) -> RolloutWorker:
    chosen = {"concurrency": 4, "backlog": 1000, "timeout_s": 120, **limits}
    return RolloutWorker(bench.engine, bench.keeper, at.prompts, at.samples, "w", Limits(**chosen))  # type: ignore[arg-type]


async def until(depth: int, at: RedisStreams) -> None:
    async with asyncio.timeout(120):
        while await at.prompts.depth() != depth:
            await asyncio.sleep(0.02)


async def test_prompts_become_samples(tied: Bench, redis_url: str, run_name: str) -> None:
    """End to end through a real Redis: whole groups, in one step with the acknowledgement."""
    async with streams(redis_url, run_name) as at:
        prompts = [group(SHARED_PROMPT[: 10 + i], num_samples=3, seed=i) for i in range(6)]
        for prompt in prompts:
            await at.prompts.put(prompt.SerializeToString())
        worker = worker_of(tied, at)
        working = asyncio.create_task(worker.run())
        await until(0, at)
        worker.stop()
        await working
        entries = await at.samples.take(100, 1)
    made = [Sample.FromString(e.data) for e in entries]
    assert sorted(s.id for s in made) == sorted(f"{p.group_id}/{i}" for p in prompts for i in range(3))
    for sample in made:
        check_sample(tied, sample)


async def test_what_can_never_be_generated_goes_to_the_dead_letters(tied: Bench, redis_url: str, run_name: str) -> None:
    async with streams(redis_url, run_name) as at:
        await at.prompts.put(b"\xff\xff")
        await at.prompts.put(group(SHARED_PROMPT * 2).SerializeToString())
        worker = worker_of(tied, at)
        working = asyncio.create_task(worker.run())
        await until(0, at)
        worker.stop()
        await working
        reasons = sorted(letter.reason for letter in await at.dead.read())
    assert reasons[0].startswith("rollout: not a Prompt")
    assert reasons[1].startswith("rollout: token_ids has 400 tokens")


async def test_a_full_sample_stream_holds_the_worker_back(tied: Bench, redis_url: str, run_name: str) -> None:
    """Q-09: nothing is taken, nothing dropped."""
    async with streams(redis_url, run_name) as at:
        for _ in range(4):
            await at.samples.put(b"waiting")
        await at.prompts.put(group([1, 2]).SerializeToString())
        worker = worker_of(tied, at, backlog=4)
        working = asyncio.create_task(worker.run())
        await asyncio.sleep(1)
        assert await at.prompts.pending() == 0 and await at.prompts.depth() == 1
        await at.samples.done([e.id for e in await at.samples.take(4, 1)])
        await until(0, at)
        worker.stop()
        await working


async def test_out_of_rotation_it_takes_nothing_and_a_cancelled_worker_gives_back(
    tied: Bench, redis_url: str, run_name: str
) -> None:
    async with streams(redis_url, run_name) as at:
        await at.prompts.put(group([1, 2], max_new_tokens=250, temperature=0.3).SerializeToString())
        tied.keeper.problem = "set by the test"
        working = asyncio.create_task(worker_of(tied, at).run())
        await asyncio.sleep(0.7)
        assert await at.prompts.pending() == 0
        tied.keeper.problem = None
        while not await at.prompts.pending():
            await asyncio.sleep(0.01)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        again = await at.prompts.take(1, 1)
    assert len(again) == 1 and again[0].deliveries == 2
