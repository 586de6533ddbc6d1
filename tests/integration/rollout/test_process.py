"""The service as a process of its own: it joins late, is killed, comes back, and ends when asked to."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.rollout.generating import SHARED_PROMPT, TOLERANCE, group
from tests.integration.rollout.models import TinyModel, make_model, named_tensors, reference_log_probs
from trireme.contracts.grpc import channel
from trireme.contracts.v1 import rollout_pb2, rollout_pb2_grpc
from trireme.contracts.v1.sample_pb2 import Sample
from trireme.registry import Registry, ServiceRecord
from trireme.streams.redis import RedisStreams
from trireme.weights.manifest import build
from trireme.weights.shm import ShmTransport

pytestmark = pytest.mark.slow

START_S = 300


def write_config(path: Path, model: TinyModel, run: str, redis_url: str) -> Path:
    config = {
        "run": {"name": run, "dir": str(path.parent)},
        "redis": {"url": redis_url},
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 2},
        "policy": {
            "model_name": str(model.folder),
            "precision": "float32",
            "max_total_sequence_length": 300,
            "megatron_cfg": {"enabled": True},
            "generation": {
                "max_new_tokens": 64,
                "vllm_cfg": {"enforce_eager": True},
                "vllm_kwargs": {"kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 32},
            },
        },
        "data": {"dataset_name": "reasoning_gym/chain_sum", "max_input_seq_length": 200},
        "stream": {"lease_s": 2.0},
    }
    path.write_text(yaml.safe_dump(config))
    return path


@asynccontextmanager
async def service(config: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    arguments = ["-m", "services.rollout", "--config", str(config), "--name", "late"]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, start_new_session=True)
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def announced(registry: Registry, process: asyncio.subprocess.Process, version: int) -> ServiceRecord:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.returncode is None, f"the service ended with {process.returncode}"
        for record in await registry.list("rollout"):
            if record.pid == process.pid and record.weight_version == version:
                return record
        await asyncio.sleep(0.2)
    raise AssertionError(f"no rollout server with version {version} after {START_S} s")


async def collect(at: RedisStreams, count: int) -> list[Sample]:
    made: list[Sample] = []
    async with asyncio.timeout(60):
        while len(made) < count:
            made += [Sample.FromString(e.data) for e in await at.samples.take(100, 1)]
    return made


@pytest.mark.timeout(900)
async def test_a_server_joins_late_is_killed_and_comes_back(tmp_path: Path, redis_url: str, run_name: str) -> None:
    """Q-12, W-07: it begins with the newest weights and not with its folder's; kill -9 amid a group loses nothing and
    doubles nothing; its successor catches up by itself; SIGTERM ends it with code 0."""
    model = make_model(tmp_path / "model", tied=True)
    config = write_config(tmp_path / "run.yaml", model, run_name, redis_url)
    weights, transport = model.fresh(5), ShmTransport(run_name)
    tensors = named_tensors(weights)
    async with RedisStreams(redis_url, run_name) as at:
        registry = Registry(at.client, run_name)
        published = transport.offer(build(3, run_name, tensors), tensors)
        await registry.set_manifest(published.SerializeToString())
        prompts = [group(SHARED_PROMPT, seed=i, max_new_tokens=60, temperature=0.4) for i in range(8)]
        async with service(config) as first:
            await announced(registry, first, 3)
            for prompt in prompts:
                await at.prompts.put(prompt.SerializeToString())
            while not await at.prompts.pending():
                await asyncio.sleep(0.005)
            os.killpg(first.pid, signal.SIGKILL)
            await first.wait()
            assert await at.prompts.depth() > 0
        async with service(config) as second:
            record = await announced(registry, second, 3)
            made = await collect(at, 16)
            await _answers(record)
            second.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(second.wait(), 60) == 0
        assert await at.prompts.depth() == 0
        assert [r.pid for r in await registry.list("rollout")] != [second.pid]
    transport.close()
    assert sorted(s.id for s in made) == sorted(f"{p.group_id}/{i}" for p in prompts for i in range(2))
    for sample in made:
        assert {span.version for span in sample.versions} == {3}
        expected = reference_log_probs(weights, SHARED_PROMPT, list(sample.response_token_ids), 0.4)
        assert float((torch.tensor(list(sample.log_probs)) - expected).abs().max()) < TOLERANCE


async def _answers(record: ServiceRecord) -> None:
    """Health, status, metrics under vLLM's names and ours."""
    async with channel(record.address) as to:
        health = await health_pb2_grpc.HealthStub(to).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        status = await rollout_pb2_grpc.RolloutServiceStub(to).GetStatus(rollout_pb2.RolloutStatusRequest(), timeout=5)
        assert (status.name, status.weight_version) == ("late", 3) and status.generated_tokens > 0
    text = await asyncio.to_thread(
        lambda: urllib.request.urlopen(f"http://{record.metrics_address}/metrics", timeout=5).read().decode()
    )
    for name in ("vllm:num_requests_running", "vllm:generation_tokens_total", "trireme_rollout_weight_version 3.0"):
        assert name in text


@pytest.mark.timeout(400)
async def test_a_dead_engine_ends_the_process(tmp_path: Path, redis_url: str, run_name: str) -> None:
    """A server whose engine is gone must not linger: it exits with 1 and says why."""
    model = make_model(tmp_path / "model", tied=True)
    config = write_config(tmp_path / "run.yaml", model, run_name, redis_url)
    async with RedisStreams(redis_url, run_name) as at, service(config) as process:
        await announced(Registry(at.client, run_name), process, 0)
        os.kill(engine_core_of(process.pid), signal.SIGKILL)
        assert await asyncio.wait_for(process.wait(), 30) == 1


def engine_core_of(pid: int) -> int:
    """vLLM's engine process, a child of the service's."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in children:
        if "EngineCore" in Path(f"/proc/{child}/cmdline").read_text() + Path(f"/proc/{child}/comm").read_text():
            return int(child)
    raise AssertionError(f"no engine among {children}")
