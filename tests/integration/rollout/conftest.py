"""Two real vLLM engines for the whole suite (starting one takes most of a minute), each with a publisher."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import LlamaForCausalLM

from services.rollout.settings import EngineSettings
from services.rollout.updates import WeightKeeper
from services.rollout.vllm_engine import VllmEngine
from tests.integration.rollout.models import END_OF_TURN, EOS, TinyModel, make_model, named_tensors
from trireme.contracts.v1.weights_pb2 import WeightManifest
from trireme.weights.manifest import build
from trireme.weights.shm import ShmTransport

MAX_MODEL_LEN = 320
RUN = f"rollout-test-{os.getpid()}"
KWARGS = {"kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 64}


class Bench:
    """An engine, the weights that it should have, and what is needed to change them."""

    def __init__(self, model: TinyModel, engine: VllmEngine, versions: Iterator[int]) -> None:
        self.model, self.engine = model, engine
        self.weights: LlamaForCausalLM = model.fresh(0)
        self.transport = ShmTransport(RUN)
        self.keeper = WeightKeeper(engine, self.transport, RUN, timeout_s=30)
        self._versions = versions

    def offer(self, weights: LlamaForCausalLM) -> WeightManifest:
        """Put `weights` on offer as the next version."""
        tensors = named_tensors(weights)
        return self.transport.offer(build(next(self._versions), RUN, tensors), tensors)

    async def publish(self, seed: int, *, in_flight: bool = False) -> LlamaForCausalLM:
        """Give the engine fresh weights."""
        weights = self.model.fresh(seed)
        await self.keeper.update(self.offer(weights), in_flight=in_flight)
        self.weights = weights
        return weights


@pytest.fixture(scope="session", autouse=True)
def threads() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "2")


async def _bench(folder: Path, *, tied: bool, compiled: bool) -> AsyncIterator[Bench]:
    # A folder as people have them: sampling defaults that must not apply, and a second end token.
    defaults = {"repetition_penalty": 1.3, "top_k": 5, "temperature": 0.3, "eos_token_id": [EOS, END_OF_TURN]}
    model = make_model(folder, tied=tied, generation_config=defaults)
    os.environ.pop("TORCH_COMPILE_DISABLE", None)  # set by an eager engine for its process, which here is shared
    engine = await VllmEngine.start(
        EngineSettings(
            model=str(folder),
            tokenizer=str(folder),
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            enforce_eager=not compiled,
            extra=KWARGS,
        )
    )
    bench = Bench(model, engine, itertools.count(1))
    yield bench
    bench.transport.close()
    await engine.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tied(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    """Head and embedding share one tensor; no compilation."""
    async for bench in _bench(tmp_path_factory.mktemp("tied"), tied=True, compiled=False):
        yield bench


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def untied(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    """A head of its own; the model is compiled, as it is by default."""
    async for bench in _bench(tmp_path_factory.mktemp("untied"), tied=False, compiled=True):
        yield bench


@pytest.fixture(params=["tied", "untied"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """Both, one after the other."""
    found: Bench = request.getfixturevalue(request.param)
    return found
