"""The reward service as a process, with a real Redis and real gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from trireme.contracts.grpc import channel
from trireme.contracts.v1 import reward_pb2, reward_pb2_grpc, sample_pb2
from trireme.registry import Registry, ServiceRecord
from trireme.streams.redis import RedisStreams

pytestmark = pytest.mark.asyncio
ROOT = Path(__file__).parents[3]
START_S = 60.0
DEADLINE_S = 60.0
MISBEHAVING = "tests.integration.reward.misbehaving:Misbehaving"


@pytest.fixture
def config_file(tmp_path: Path, redis_url: str, run_name: str) -> Path:
    (tmp_path / "model").mkdir()
    config = {
        "policy": {"model_name": str(tmp_path / "model"), "megatron_cfg": {"enabled": True}},
        "data": {"dataset_name": "reasoning_gym/chain_sum"},
        "redis": {"url": redis_url},
        "run": {"name": run_name, "dir": str(tmp_path / "run")},
        "reward": {"workers": 2, "timeout_s": 3.0, "max_attempts": 2, "verifiers": [MISBEHAVING]},
        "stream": {"lease_s": 2.0, "max_deliveries": 5},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    return path


@contextmanager
def service(config_file: Path, name: str = "reward-0", *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "services.reward", "--config", str(config_file), "--name", name, *overrides]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


async def found(streams: RedisStreams, run: str, name: str = "reward-0") -> ServiceRecord:
    registry, deadline = Registry(streams.client, run), time.monotonic() + START_S
    while time.monotonic() < deadline:
        for record in await registry.list("reward"):
            if record.name == name:
                return record
        await asyncio.sleep(0.1)
    raise TimeoutError("the service did not announce itself")


@asynccontextmanager
async def stub(record: ServiceRecord) -> AsyncIterator[reward_pb2_grpc.RewardServiceStub]:
    async with channel(record.address) as open_channel:
        yield reward_pb2_grpc.RewardServiceStub(open_channel)


def request(identifier: str, response: str, **payload: object) -> reward_pb2.ScoreRequest:
    task = sample_pb2.Task(verifier=str(payload.pop("verifier", "exact")), payload_json=json.dumps(payload))
    return reward_pb2.ScoreRequest(id=identifier, response_text=response, task=task)


def sample(group: str, index: int, size: int, response: str, **payload: object) -> sample_pb2.Sample:
    task = sample_pb2.Task(verifier=str(payload.pop("verifier", "exact")), payload_json=json.dumps(payload))
    return sample_pb2.Sample(
        id=f"{group}/{index}", group_id=group, group_index=index, group_size=size, response_text=response, task=task
    )


async def drained(streams: RedisStreams, count: int, within_s: float = DEADLINE_S) -> list[sample_pb2.Sample]:
    """`count` scored samples, acknowledged."""
    scored: list[sample_pb2.Sample] = []
    deadline = time.monotonic() + within_s
    while len(scored) < count and time.monotonic() < deadline:
        entries = await streams.scored.take(count, 0.5)
        scored += [sample_pb2.Sample.FromString(entry.data) for entry in entries]
        await streams.scored.done([entry.id for entry in entries])
    return scored


async def test_score_over_grpc(config_file: Path, redis_url: str, run_name: str) -> None:
    """Scores, failures and refusals as a caller sees them; a score of 0 is a score (R-25)."""
    async with RedisStreams(redis_url, run_name) as streams:
        with service(config_file):
            async with stub(await found(streams, run_name)) as reward:
                right = await reward.Score(request("a", "42", answer="42"), timeout=DEADLINE_S)
                wrong = await reward.Score(request("b", "41", answer="42"), timeout=DEADLINE_S)
                assert (right.id, right.reward.score.value) == ("a", 1.0)
                assert wrong.reward.HasField("score") and wrong.reward.score.value == 0.0
                assert (right.reward.verifier, right.reward.verifier_version) == ("exact", "1")
                listed = await reward.ListVerifiers(reward_pb2.ListVerifiersRequest(), timeout=5)
                assert {v.name for v in listed.verifiers} >= {"exact", "math", "reasoning_gym", "misbehaving"}
                assert all(json.loads(v.payload_schema_json)["properties"] for v in listed.verifiers)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await reward.Score(request("c", "42", anser="42"), timeout=5)
                assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert "anser" in refused.value.details() or "answer" in refused.value.details()
                assert '"c"' in refused.value.details() and "properties" in refused.value.details()
                with pytest.raises(grpc.aio.AioRpcError) as unknown:
                    await reward.Score(request("d", "42", verifier="exakt"), timeout=5)
                assert unknown.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert "reasoning_gym" in unknown.value.details()
