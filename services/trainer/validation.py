"""Greedy evaluation on prompts that training never sees, over the same gRPC APIs that external users call."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from trireme.contracts.grpc import channel
from trireme.contracts.v1 import reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc, sample_pb2

RETRIES = retry_if_exception_type(grpc.aio.AioRpcError)
ATTEMPTS = 3


class NoServers(Exception):
    """There is nobody to generate, or nobody to score."""


@dataclass(frozen=True)
class ValidationResult:
    """Scores of one evaluation.

    accuracy: mean score of the prompts that could be scored. scored, failed: how many could and could not.
    mean_length: response tokens. samples: the completions, with their rewards.
    """

    accuracy: float
    scored: int
    failed: int
    mean_length: float
    samples: list[sample_pb2.Sample]

    def metrics(self) -> dict[str, float]:
        return {
            "validation/accuracy": self.accuracy,
            "validation/scored": self.scored,
            "validation/failed": self.failed,
            "validation/mean_response_length": self.mean_length,
        }


class Validator:
    """Generates and scores a fixed set of prompts.

    concurrency: prompts under way at once. deadline_s: of each call.
    """

    def __init__(
        self,
        prompts: Sequence[sample_pb2.Prompt],
        *,
        concurrency: int,
        generate_deadline_s: float,
        score_deadline_s: float,
        policy_failure_score: float,
    ) -> None:
        self._prompts = prompts
        self._concurrency = concurrency
        self._generate_deadline_s, self._score_deadline_s = generate_deadline_s, score_deadline_s
        self._policy_failure_score = policy_failure_score

    async def run(self, rollouts: Sequence[str], rewards: Sequence[str], version: int) -> ValidationResult:
        """Evaluate weights `version`. `rollouts` and `rewards` are addresses; load is dealt over them in turn.

        Raises NoServers, or AioRpcError when a call fails again and again.
        """
        if not rollouts or not rewards:
            raise NoServers(f"{len(rollouts)} rollout and {len(rewards)} reward servers are registered")
        servers, scorers = itertools.cycle(rollouts), itertools.cycle(rewards)
        channels = {address: channel(address) for address in {*rollouts, *rewards}}
        gate = asyncio.Semaphore(self._concurrency)

        async def one(prompt: sample_pb2.Prompt) -> sample_pb2.Sample:
            async with gate:
                async for attempt in AsyncRetrying(
                    retry=RETRIES, stop=stop_after_attempt(ATTEMPTS), wait=wait_exponential(0.5), reraise=True
                ):
                    with attempt:
                        sample = await self._generate(channels[next(servers)], prompt, version)
                        sample.reward.CopyFrom(await self._score(channels[next(scorers)], sample))
                return sample

        try:
            samples = await asyncio.gather(*(one(prompt) for prompt in self._prompts))
        finally:
            await asyncio.gather(*(open_channel.close(None) for open_channel in channels.values()))
        return self._summarise(samples)

    async def _generate(self, target: grpc.aio.Channel, prompt: sample_pb2.Prompt, version: int) -> sample_pb2.Sample:
        request = rollout_pb2.GenerateRequest(prompt=prompt)
        request.prompt.min_weight_version = version
        call = rollout_pb2_grpc.RolloutServiceStub(target).Generate(request, timeout=self._generate_deadline_s)
        samples = [event.sample async for event in call if event.HasField("sample")]
        return samples[0]

    async def _score(self, target: grpc.aio.Channel, sample: sample_pb2.Sample) -> sample_pb2.Reward:
        request = reward_pb2.ScoreRequest(
            id=sample.id,
            task=sample.task,
            prompt_text=sample.prompt_text,
            response_text=sample.response_text,
            finish_reason=sample.finish_reason,
            trace_id=sample.trace_id,
        )
        stub = reward_pb2_grpc.RewardServiceStub(target)
        return (await stub.Score(request, timeout=self._score_deadline_s)).reward

    def _summarise(self, samples: list[sample_pb2.Sample]) -> ValidationResult:
        scores = [value for sample in samples if (value := self._value(sample.reward)) is not None]
        lengths = [len(sample.response_token_ids) for sample in samples]
        return ValidationResult(
            accuracy=sum(scores) / len(scores) if scores else float("nan"),
            scored=len(scores),
            failed=len(samples) - len(scores),
            mean_length=sum(lengths) / len(lengths) if lengths else 0.0,
            samples=samples,
        )

    def _value(self, reward: sample_pb2.Reward) -> float | None:
        """None for an infrastructure failure: it is no verdict on the model."""
        match reward.WhichOneof("outcome"):
            case "score":
                return reward.score.value
            case "policy_failure":
                return self._policy_failure_score
            case _:
                return None
