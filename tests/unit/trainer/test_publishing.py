"""Publishing to, and validating with, servers behind real gRPC; what they answer is made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import grpc
import pytest
import torch
from torch import Tensor

from services.trainer.publishing import Publisher, PublishError
from services.trainer.validation import ATTEMPTS, NoServers, Validator
from tests.unit.trainer.builders import sample
from trireme.contracts import rewards
from trireme.contracts.grpc import Service, serve
from trireme.contracts.v1 import reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc, sample_pb2
from trireme.contracts.v1.weights_pb2 import WeightManifest
from trireme.registry import Kind, Registry, ServiceRecord
from trireme.weights.base import Transport

REFUSED, UNAVAILABLE = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE
SILENT = grpc.StatusCode.DEADLINE_EXCEEDED  # of a server that never answers
TIMEOUT_S = 0.5
TENSORS = [("weight", torch.arange(6.0))]


class FakeRegistry:
    """The servers it is given, and the manifest it was told last."""

    def __init__(self, servers: Sequence[ServiceRecord] = ()) -> None:
        self.servers, self.manifest = list(servers), WeightManifest()

    async def list(self, kind: Kind) -> list[ServiceRecord]:
        return [server for server in self.servers if server.kind == kind]

    async def set_manifest(self, manifest: bytes) -> None:
        self.manifest = WeightManifest.FromString(manifest)


class FakeTransport:
    """Keeps what is offered and says that it lies here. full: there is no room."""

    def __init__(self, full: bool = False) -> None:
        self.full, self.offered = full, dict[int, list[tuple[str, Tensor]]]()

    def offer(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> WeightManifest:
        if self.full:
            raise RuntimeError("no room")
        self.offered[manifest.version] = list(tensors)
        manifest.location = "here"
        return manifest


class FakeRollout(rollout_pb2_grpc.RolloutServiceServicer):
    """Takes weights unless `answer` is a code. Generates `text` for prompts, failing the first `failures` calls."""

    def __init__(self, answer: grpc.StatusCode | None = None, text: str = "four", failures: int = 0) -> None:
        self.answer, self.text, self.failures = answer, text, failures
        self.updates: list[rollout_pb2.UpdateWeightsRequest] = []
        self.prompts: list[sample_pb2.Prompt] = []

    async def UpdateWeights(self, request: rollout_pb2.UpdateWeightsRequest, context: Any) -> Any:
        self.updates.append(request)
        if self.answer is SILENT:
            await asyncio.Event().wait()
        if self.answer is not None:
            await context.abort(self.answer, "so it is")
        return rollout_pb2.UpdateWeightsResponse(version=request.manifest.version)

    async def Generate(self, request: rollout_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        self.prompts.append(request.prompt)
        if len(self.prompts) <= self.failures:
            await context.abort(UNAVAILABLE, "the engine died")
        text = request.prompt.text
        yield rollout_pb2.GenerateResponse(delta=rollout_pb2.TokenDelta())
        yield rollout_pb2.GenerateResponse(sample=sample(text, prompt_text=text, response_text=self.text))


class FakeReward(reward_pb2_grpc.RewardServiceServicer):
    """Scores by the prompt's text, failing the first `failures` calls."""

    def __init__(self, outcomes: dict[str, sample_pb2.Reward], failures: int = 0) -> None:
        self.outcomes, self.failures = outcomes, failures
        self.requests: list[reward_pb2.ScoreRequest] = []

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        self.requests.append(request)
        if len(self.requests) <= self.failures:
            await context.abort(UNAVAILABLE, "no worker")
        return reward_pb2.ScoreResponse(reward=self.outcomes[request.prompt_text])


@asynccontextmanager
async def serving(*servicers: FakeRollout | FakeReward) -> AsyncIterator[list[str]]:
    """The address of a server for each."""
    async with AsyncExitStack() as stack:
        addresses = []
        for servicer in servicers:
            server, port = await serve([_service(servicer)], "127.0.0.1", 0)
            stack.push_async_callback(server.stop, None)
            addresses.append(f"127.0.0.1:{port}")
        yield addresses


def _service(servicer: FakeRollout | FakeReward) -> Service:
    if isinstance(servicer, FakeRollout):
        return rollout_pb2_grpc.add_RolloutServiceServicer_to_server, servicer, "trireme.v1.RolloutService"
    return reward_pb2_grpc.add_RewardServiceServicer_to_server, servicer, "trireme.v1.RewardService"


def records(addresses: Sequence[str]) -> list[ServiceRecord]:
    """A record for each, named rollout-0, rollout-1 and so on."""
    return [ServiceRecord("rollout", f"rollout-{n}", one, "", 1, 0, "", 0.0) for n, one in enumerate(addresses)]


def publisher(
    registry: FakeRegistry, transport: FakeTransport | None = None, *, version: int = 4, in_flight: bool = False
) -> Publisher:
    return Publisher(
        "r",
        cast(Registry, registry),
        cast(Transport, transport or FakeTransport()),
        version=version,
        dtype=torch.bfloat16,
        timeout_s=TIMEOUT_S,
        in_flight=in_flight,
    )


class TestPublishing:
    @pytest.mark.parametrize("in_flight", [False, True])
    async def test_every_server_is_told_the_manifest_of_what_is_on_offer(self, in_flight: bool) -> None:
        servicers, transport = [FakeRollout(), FakeRollout()], FakeTransport()
        async with serving(*servicers) as addresses:
            registry = FakeRegistry(records(addresses))
            publishing = publisher(registry, transport, in_flight=in_flight)
            report = await publishing.publish(lambda: iter(TENSORS))
            await publishing.publish(lambda: TENSORS)
        assert (report.version, report.updated, report.failed) == (5, ("rollout-0", "rollout-1"), ())
        assert list(transport.offered) == [5, 6] and publishing.version == registry.manifest.version == 6
        assert torch.equal(transport.offered[5][0][1], TENSORS[0][1].bfloat16())
        for servicer in servicers:
            assert [update.manifest.version for update in servicer.updates] == [5, 6]
            assert servicer.updates[-1].manifest == registry.manifest
            assert {update.in_flight for update in servicer.updates} == {in_flight}
        assert (registry.manifest.run, registry.manifest.location) == ("r", "here")
        described = [(info.name, info.dtype, list(info.shape)) for info in registry.manifest.tensors]
        assert described == [("weight", "BF16", [6])]

    async def test_servers_that_all_refuse_are_an_error(self) -> None:
        async with serving(FakeRollout(REFUSED), FakeRollout(grpc.StatusCode.INTERNAL)) as addresses:
            with pytest.raises(PublishError, match="no rollout server took weight version 5") as caught:
                await publisher(FakeRegistry(records(addresses))).publish(lambda: TENSORS)
        assert f"rollout-0 at {addresses[0]}: FAILED_PRECONDITION: so it is" in str(caught.value)
        assert f"rollout-1 at {addresses[1]}: INTERNAL: so it is" in str(caught.value)

    @pytest.mark.parametrize("answer", [UNAVAILABLE, SILENT, grpc.StatusCode.CANCELLED])
    async def test_servers_that_cannot_be_reached_are_counted(self, answer: grpc.StatusCode) -> None:
        """They, or those that replace them, catch up from the manifest: the version counts all the same."""
        async with serving(FakeRollout(answer), FakeRollout(answer)) as addresses:
            registry = FakeRegistry(records(addresses))
            publishing = publisher(registry)
            report = await publishing.publish(lambda: TENSORS)
        assert report.updated == () and report.metrics()["train/weight_update_failures"] == 2
        assert [text.partition(": ")[2].partition(":")[0] for text in report.failed] == [answer.name] * 2
        assert report.version == publishing.version == registry.manifest.version == 5

    async def test_a_server_that_is_gone_cannot_be_reached(self, free_port: int) -> None:
        report = await publisher(FakeRegistry(records([f"127.0.0.1:{free_port}"]))).publish(lambda: TENSORS)
        assert report.updated == () and len(report.failed) == 1

    @pytest.mark.parametrize("others", [None, UNAVAILABLE])
    async def test_one_refusal_among_others_is_only_reported(self, others: grpc.StatusCode | None) -> None:
        """Whoever took the weights, or is to come back, can do the work."""
        async with serving(FakeRollout(others), FakeRollout(REFUSED), FakeRollout()) as addresses:
            chosen = records(addresses) if others is None else records(addresses)[:2]
            report = await publisher(FakeRegistry(chosen)).publish(lambda: TENSORS)
        assert report.updated == (("rollout-0", "rollout-2") if others is None else ())
        assert any(text.startswith(f"rollout-1 at {addresses[1]}: FAILED_PRECONDITION") for text in report.failed)
        assert len(report.failed) == len(chosen) - len(report.updated)

    async def test_a_publish_with_nobody_there_is_complete(self) -> None:
        """A server that joins later finds the manifest."""
        registry = FakeRegistry()
        report = await publisher(registry, version=0).publish(lambda: TENSORS)
        assert (report.version, registry.manifest.version, report.failed) == (1, 1, ())

    async def test_what_could_not_be_offered_is_no_version(self) -> None:
        registry = FakeRegistry()
        publishing = publisher(registry, FakeTransport(full=True))
        with pytest.raises(RuntimeError, match="no room"):
            await publishing.publish(lambda: TENSORS)
        assert publishing.version == 4 and registry.manifest.version == 0


OUTCOMES = {
    "a": rewards.score(1.0, verifier="t"),
    "b": rewards.score(0.5, verifier="t"),
    "c": rewards.policy_failure("malformed", verifier="t"),
    "d": rewards.infrastructure_failure("timeout", 3, verifier="t"),
}


def validator(texts: str = "abcd", concurrency: int = 4) -> Validator:
    return Validator(
        [sample_pb2.Prompt(text=text, group_id=text, token_ids=[1], num_samples=1) for text in texts],
        concurrency=concurrency,
        generate_deadline_s=5.0,
        score_deadline_s=5.0,
        policy_failure_score=-1.0,
    )


class TestValidation:
    async def test_is_the_mean_of_what_could_be_scored(self) -> None:
        """R-28: an answer that cannot be scored counts as configured, a scorer that failed not at all."""
        rollout, reward = FakeRollout(), FakeReward(OUTCOMES)
        async with serving(rollout, reward) as (generates, scores):
            result = await validator().run([generates], [scores], version=7)
        assert result.accuracy == pytest.approx((1.0 + 0.5 - 1.0) / 3)
        assert (result.scored, result.failed, result.mean_length) == (3, 1, 2.0)
        assert [one.prompt_text for one in result.samples] == list("abcd")
        assert [one.reward for one in result.samples] == [OUTCOMES[text] for text in "abcd"]
        assert {prompt.min_weight_version for prompt in rollout.prompts} == {7}
        assert {request.response_text for request in reward.requests} == {"four"}

    async def test_deals_prompts_over_all_servers(self) -> None:
        rollouts, reward = [FakeRollout(), FakeRollout()], FakeReward(OUTCOMES)
        async with serving(*rollouts, reward) as addresses:
            await validator().run(addresses[:2], addresses[2:], version=1)
        assert [len(rollout.prompts) for rollout in rollouts] == [2, 2]

    @pytest.mark.parametrize("missing", ["rollout", "reward"])
    async def test_without_servers_of_a_kind_says_so(self, missing: str) -> None:
        rollouts, scorers = ([], ["x:1"]) if missing == "rollout" else (["x:1"], [])
        with pytest.raises(NoServers, match=rf"{len(rollouts)} rollout and {len(scorers)} reward servers"):
            await validator().run(rollouts, scorers, version=1)

    @pytest.mark.parametrize(("generating", "scoring"), [(1, 0), (0, 1)])
    async def test_a_call_that_fails_once_is_repeated(self, generating: int, scoring: int) -> None:
        rollout, reward = FakeRollout(failures=generating), FakeReward(OUTCOMES, failures=scoring)
        async with serving(rollout, reward) as (generates, scores):
            result = await validator("ab").run([generates], [scores], version=1)
        assert result.accuracy == 0.75 and result.scored == 2
        assert len(rollout.prompts) >= 2 + generating and len(reward.requests) == 2 + scoring

    async def test_a_call_that_fails_again_and_again_is_an_error(self) -> None:
        rollout, reward = FakeRollout(failures=10**9), FakeReward(OUTCOMES)
        async with serving(rollout, reward) as (generates, scores):
            with pytest.raises(grpc.aio.AioRpcError, match="the engine died"):
                await validator("a").run([generates], [scores], version=1)
        assert len(rollout.prompts) == ATTEMPTS and not reward.requests

    async def test_keeps_to_its_concurrency(self) -> None:
        under_way, most = 0, 0

        class Slow(FakeRollout):
            async def Generate(self, request: rollout_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
                nonlocal under_way, most
                under_way += 1
                most = max(most, under_way)
                await asyncio.sleep(0.05)
                async for event in super().Generate(request, context):
                    yield event
                under_way -= 1

        async with serving(Slow(), FakeReward(OUTCOMES)) as (generates, scores):
            await validator("abcdabcd", concurrency=3).run([generates], [scores], version=1)
        assert most == 3
