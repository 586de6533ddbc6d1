"""The reward service as a process, with a real Redis and real gRPC."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from trireme.contracts.grpc import channel
from trireme.contracts.v1 import reward_pb2, reward_pb2_grpc, sample_pb2
from trireme.registry import Registry, ServiceRecord
from trireme.streams.redis import RedisStreams

pytestmark = pytest.mark.asyncio
ROOT = Path(__file__).parents[3]
START_S = 240.0  # bounds, not expectations: machines under test are shared
DEADLINE_S = 240.0
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
            process.wait(120)


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
                listed = await reward.ListVerifiers(reward_pb2.ListVerifiersRequest(), timeout=60)
                assert {v.name for v in listed.verifiers} >= {"exact", "math", "reasoning_gym", "misbehaving"}
                assert all(json.loads(v.payload_schema_json)["properties"] for v in listed.verifiers)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await reward.Score(request("c", "42", anser="42"), timeout=60)
                assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert "anser" in refused.value.details() or "answer" in refused.value.details()
                assert '"c"' in refused.value.details() and "properties" in refused.value.details()
                with pytest.raises(grpc.aio.AioRpcError) as unknown:
                    await reward.Score(request("d", "42", verifier="exakt"), timeout=60)
                assert unknown.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert "reasoning_gym" in unknown.value.details()


async def test_a_stream_of_requests(config_file: Path, redis_url: str, run_name: str) -> None:
    """R-22, R-24, Q-01: one answer for each request by its id, as they become ready; large requests pass."""
    async with RedisStreams(redis_url, run_name) as streams:
        with service(config_file):
            async with stub(await found(streams, run_name)) as reward:
                big = "x" * (5 << 20)
                sent = [request(str(i), str(i % 3), answer="1") for i in range(300)]
                sent.append(request("big", big, answer=big))
                sent.append(request("crash", "exit", verifier="misbehaving"))
                answers = [a async for a in reward.ScoreStream(iter_async(sent), timeout=DEADLINE_S)]
                rewards = {a.id: a.reward for a in answers}
                assert len(answers) == len(rewards) == len(sent)
                assert {i for i, r in rewards.items() if r.score.value == 1.0} == {
                    *(str(i) for i in range(300) if i % 3 == 1),
                    "big",
                }
                assert rewards["crash"].infrastructure_failure.attempts == 2
                assert "exit code 3" in rewards["crash"].infrastructure_failure.reason
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    bad = [request("good", "1", answer="1"), request("bad", "1", answer=[])]
                    async for _ in reward.ScoreStream(iter_async(bad), timeout=DEADLINE_S):
                        pass
                assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert '"bad"' in refused.value.details() and "answer" in refused.value.details()


async def iter_async(requests: list[reward_pb2.ScoreRequest]) -> AsyncIterator[reward_pb2.ScoreRequest]:
    for one in requests:
        yield one


async def test_a_deadline_is_kept_and_frees_the_process(config_file: Path, redis_url: str, run_name: str) -> None:
    """Q-11: the caller hears in time, and others are served."""
    async with RedisStreams(redis_url, run_name) as streams:
        with service(config_file, "reward-0", "reward.workers=1", "reward.timeout_s=2000.0"):
            async with stub(await found(streams, run_name)) as reward:
                await reward.Score(request("warm", "score", verifier="misbehaving"), timeout=DEADLINE_S)
                with pytest.raises(grpc.aio.AioRpcError) as late:
                    await reward.Score(request("slow", "score", verifier="misbehaving", seconds=1000), timeout=1)
                assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
                after = await reward.Score(request("next", "score", verifier="misbehaving"), timeout=DEADLINE_S)
                assert after.reward.score.value == 1.0


async def test_samples_become_scored_samples(config_file: Path, redis_url: str, run_name: str) -> None:
    """R-28, Q-05: everything but the reward comes through unchanged; what cannot be scored is marked as such, what is
    no sample goes to the dead letters with the reason; nothing stays in the stream. Health and metrics say so."""
    async with RedisStreams(redis_url, run_name) as streams:
        right = sample("g", 0, 4, "42", answer="42")
        right.response_token_ids.extend([1, 2, 3])
        right.log_probs.extend([-0.1, -0.2, -0.3])
        await streams.samples.put(right.SerializeToString())
        await streams.samples.put(sample("g", 1, 4, "41", answer="42").SerializeToString())
        await streams.samples.put(sample("g", 2, 4, "segfault", verifier="misbehaving").SerializeToString())
        await streams.samples.put(sample("g", 3, 4, "42", verifier="nobody").SerializeToString())
        await streams.samples.put(b"\xff not a sample")
        await streams.samples.put(b"")
        with service(config_file):
            scored = {s.id: s for s in await drained(streams, 4)}
            record = await found(streams, run_name)
            dead = await streams.dead.read()
            async with httpx.AsyncClient() as web:
                health = (await web.get(f"http://{record.metrics_address}/healthz", timeout=60)).json()
                metrics = (await web.get(f"http://{record.metrics_address}/metrics", timeout=60)).text
        assert sorted(scored) == ["g/0", "g/1", "g/2", "g/3"]
        assert scored["g/0"].reward.score.value == 1.0
        assert scored["g/1"].reward.HasField("score")
        assert "SIGSEGV" in scored["g/2"].reward.infrastructure_failure.reason
        assert "known: exact" in scored["g/3"].reward.infrastructure_failure.reason
        scored["g/0"].ClearField("reward")
        assert scored["g/0"] == right
        assert sorted(letter.reason.split(":")[0] for letter in dead) == ["not a Sample", "not a Sample"]
        assert (await streams.samples.depth(), await streams.samples.pending()) == (0, 0)
        assert health["healthy"] and "math" in health["verifiers"]
        assert 'trireme_reward_scores_total{outcome="score",verifier="exact"} 2.0' in metrics
        assert 'trireme_reward_failures_total{cause="crash",verifier="misbehaving"} 1.0' in metrics


async def test_a_killed_worker_loses_nothing(config_file: Path, redis_url: str, run_name: str) -> None:
    """Q-12: kill -9 in the middle of scoring; another worker takes over when the leases end, and every member of every
    group arrives exactly once. The killed service's own processes die with it."""
    sent = [sample(f"g{i // 8}", i % 8, 8, "score", verifier="misbehaving", seconds=0.3) for i in range(48)]
    async with RedisStreams(redis_url, run_name) as streams:
        for one in sent:
            await streams.samples.put(one.SerializeToString())
        with service(config_file, "reward-a") as first:
            scored = await drained(streams, 4)
            children = psutil.Process(first.pid).children(recursive=True)
            assert children
            first.kill()
            first.wait()
            held = await streams.samples.pending()
            assert held > 0 and len(scored) < len(sent)
            with service(config_file, "reward-b"):
                scored += await drained(streams, len(sent) - len(scored))
                scored += await drained(streams, 1, within_s=3)
        assert sorted(s.id for s in scored) == sorted(s.id for s in sent)
        assert all(s.reward.score.value == 1.0 for s in scored)
        assert await streams.samples.depth() == 0
        assert psutil.wait_procs(children, timeout=60)[1] == []


async def test_a_scoring_longer_than_a_lease_is_not_done_twice(
    config_file: Path, redis_url: str, run_name: str
) -> None:
    """Q-08: two workers, a lease of 2 s, scorings of 5 s: leases are renewed, nobody else takes the entry."""
    async with RedisStreams(redis_url, run_name) as streams:
        with (
            service(config_file, "reward-a", "reward.timeout_s=60.0"),
            service(config_file, "reward-b", "reward.timeout_s=60.0"),
        ):
            for index in range(3):
                await streams.samples.put(
                    sample("g", index, 3, "score", verifier="misbehaving", seconds=5).SerializeToString()
                )
            scored = await drained(streams, 3)
            assert sorted(s.id for s in scored) == ["g/0", "g/1", "g/2"]
            assert await streams.dead.depth() == 0


async def test_a_term_signal_finishes_what_was_taken(config_file: Path, redis_url: str, run_name: str) -> None:
    """On SIGTERM nothing more is taken, what was taken is forwarded, and the service leaves with code 0."""
    async with RedisStreams(redis_url, run_name) as streams:
        with service(config_file) as process:
            for index in range(40):
                one = sample("g", index, 40, "score", verifier="misbehaving", seconds=0.4)
                await streams.samples.put(one.SerializeToString())
            first = await drained(streams, 1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
            rest = await drained(streams, 40, within_s=2)
            assert await streams.samples.pending() == 0
            assert 0 < len(first + rest) < 40
            assert await streams.samples.depth() == 40 - len(first + rest)
            assert await Registry(streams.client, run_name).list("reward") == []


@pytest.mark.parametrize(
    ("override", "code", "said"),
    [
        ("reward.verifiers=['no.such:Verifier']", 2, 'cannot import "no.such"'),
        ("reward.wokers=3", 2, "workers"),
        ("redis.url=redis://127.0.0.1:1/0", 1, "127.0.0.1:1"),
    ],
)
async def test_what_cannot_start_says_why(config_file: Path, override: str, code: int, said: str) -> None:
    command = [sys.executable, "-m", "services.reward", "--config", str(config_file), override]
    done = subprocess.run(
        [*command, "redis.connect_timeout_s=1.0"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


async def test_a_port_in_use_is_named(config_file: Path, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        command = [sys.executable, "-m", "services.reward", "--config", str(config_file), f"reward.port={free_port}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert f"127.0.0.1:{free_port}" in done.stderr
