"""The Engine port on vLLM's AsyncLLM."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.rollout import checkpoint
from services.rollout.engine import (
    Completion,
    Delta,
    EngineDeadError,
    EngineError,
    Finish,
    Pressure,
    Request,
    RequestRefused,
    WeightLoadError,
)
from services.rollout.load import EngineLoad
from services.rollout.settings import EngineSettings, set_cpu_environment
from trireme.contracts.v1.sample_pb2 import VersionSpan
from trireme.weights.manifest import WeightsError
from trireme.weights.segment import Segment

if TYPE_CHECKING:
    from vllm import CompletionOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

# A block stays referenced for a moment after the last request that used it; longer than this it is a leak.
CACHE_RESET_TRIES = 20
CACHE_RESET_PAUSE_S = 0.1


class VllmEngine:
    """One vLLM engine; make it with `start`."""

    def __init__(self, llm: AsyncLLM, model: str, known: checkpoint.Checkpoint, load: EngineLoad) -> None:
        self._llm, self.model = llm, model
        self._checkpoint, self._load = known, load
        self._tokenizer = llm.get_tokenizer()
        self._ends = sorted(known.eos_token_ids | {i for i in [self._tokenizer.eos_token_id] if i is not None})
        self._broken: str | None = None
        self._version = 0
        self.max_model_len: int = llm.model_config.max_model_len
        self.vocab_size: int = llm.model_config.get_vocab_size()

    @classmethod
    async def start(cls, settings: EngineSettings) -> VllmEngine:
        """Start the engine's processes and load the model; takes about a minute.

        Raises FileNotFoundError or ValueError saying what is wrong with the model or an engine argument.
        """
        # Imported here: vLLM takes seconds to import. It reads the environment when the engine starts.
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        if current_platform.is_cpu():
            set_cpu_environment(settings.extra, eager=settings.enforce_eager)
        args = AsyncEngineArgs(**settings.engine_args(cpu=current_platform.is_cpu()))
        load = EngineLoad()
        # Blocks the event loop: the engine's sockets belong to the thread that makes them.
        llm = AsyncLLM.from_engine_args(args, stat_loggers=[load.logger])
        await llm.update_weight_version("0")
        engine = cls(llm, settings.model, await asyncio.to_thread(_read_checkpoint, settings.model), load)
        await engine._warm_up()
        return engine

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request, *, stream: bool = False) -> AsyncIterator[Delta | Completion]:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError
        from vllm.v1.engine.exceptions import EngineGenerateError

        if self._broken:
            raise EngineError(f"the engine has no usable weights: {self._broken}")
        prompt = tokens_input(list(request.prompt_token_ids))
        token_ids: list[int] = []
        log_probs: list[float] = []
        try:
            async for output in self._llm.generate(prompt, self._params(request, stream), request.id):
                piece = output.outputs[0]
                new = _log_probs(piece)
                token_ids += piece.token_ids
                log_probs += new
                if stream and new:
                    yield Delta(tuple(piece.token_ids), tuple(new))
                if output.finished:
                    yield self._completion(piece, token_ids, log_probs)
        except VllmDeadError as error:
            raise EngineDeadError(f"vLLM's engine process died: {error}") from error
        except EngineGenerateError as error:
            raise EngineError(f"vLLM could not generate: {error.__cause__ or error}") from error
        except (ValueError, VLLMClientError) as error:
            raise RequestRefused(f"vLLM refuses the request: {error}") from error

    async def pause(self, *, wait: bool) -> None:
        await self._llm.pause_generation(mode="wait" if wait else "keep", clear_cache=False)

    async def resume(self) -> None:
        await self._llm.resume_generation()

    async def load(self, version: int, segment: Segment, *, in_flight: bool) -> None:
        try:
            self._checkpoint.check(segment.manifest)
        except WeightsError as error:
            raise WeightLoadError(str(error), intact=not self._broken) from error
        try:
            await self.pause(wait=not in_flight)
            args = (str(segment.path), segment.manifest.SerializeToString())
            await self._llm.collective_rpc("trireme_load_weights", args=args)
            # Frozen requests are computed again from their first token: what they sample next is then exactly what
            # the new weights alone would have, as their version spans say.
            await self.reset_cache(running_too=in_flight)
            await self._llm.update_weight_version(str(version))
            self._version, self._broken = version, None
            await self.resume()
        except Exception as error:  # whatever it was, nobody can say which weights are in force now
            await self._fence(f"loading version {version} failed: {error}")
            raise WeightLoadError(f"loading weights version {version} failed: {error}", intact=False) from error

    async def reset_cache(self, *, running_too: bool) -> None:
        for _ in range(CACHE_RESET_TRIES):
            if await self._llm.reset_prefix_cache(reset_running_requests=running_too):
                return
            await asyncio.sleep(CACHE_RESET_PAUSE_S)
        raise EngineError("the prefix cache still holds blocks in use and cannot be reset")

    def pressure(self) -> Pressure:
        return self._load.latest

    def failure(self) -> str | None:
        return "vLLM's engine process died" if self._llm.errored else None

    async def close(self) -> None:
        await asyncio.to_thread(self._llm.shutdown)

    async def _warm_up(self) -> None:
        """Generate a few tokens, so that nobody's first request waits for what vLLM compiles when it is first used."""
        for index, temperature in enumerate((0.0, 1.0)):
            request = Request(
                f"warm-up-{index}", prompt_token_ids=(0,), seed=1, max_new_tokens=1, temperature=temperature
            )
            async for _ in self.generate(request):
                pass
        await self.reset_cache(running_too=False)

    async def _fence(self, reason: str) -> None:
        """Abort what runs and stay paused: nothing may be sampled from broken weights."""
        self._broken = reason
        if not self._llm.errored:
            await self._llm.pause_generation(mode="abort", clear_cache=False)

    def _params(self, request: Request, stream: bool) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
            max_tokens=request.max_new_tokens,
            stop=list(request.stop_strings) or None,
            # The folder's generation_config.json is not in force, so its end tokens are named here.
            stop_token_ids=sorted({*([] if request.ignore_eos else self._ends), *request.stop_token_ids}),
            ignore_eos=request.ignore_eos,
            logprobs=0,
            flat_logprobs=True,
            # Only a search for stop strings needs the text as it grows; it is decoded once at the end.
            detokenize=bool(request.stop_strings),
            include_stop_str_in_output=True,
            output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, last: CompletionOutput, token_ids: list[int], log_probs: list[float]) -> Completion:
        bad = [i for i, value in enumerate(log_probs) if not math.isfinite(value)]
        if bad:
            raise EngineError(f"the log-prob of token {bad[0]} is {log_probs[bad[0]]}: the weights are damaged")
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return Completion(tuple(token_ids), tuple(log_probs), _versions(last), _finish(last.finish_reason), text)


def _log_probs(piece: CompletionOutput) -> list[float]:
    """The log-prob of each token of `piece`; a position holds that of the sampled token first."""
    flat: Any = piece.logprobs
    if flat is None:
        return []
    return [flat.logprobs[start] for start in flat.start_indices]


def _versions(last: CompletionOutput) -> tuple[VersionSpan, ...]:
    """vLLM stamps each output with the version that its engine core ran under."""
    spans = last.weight_versions or []
    return tuple(VersionSpan(start=s.start, length=s.end - s.start, version=int(s.version)) for s in spans)


def _finish(reason: str | None) -> Finish:
    known: dict[str | None, Finish] = {"stop": "stop", "length": "length", "repetition": "stop"}
    return known.get(reason, "aborted")


def _read_checkpoint(model: str) -> checkpoint.Checkpoint:
    """The checkpoint in a folder, or in the Hugging Face cache that vLLM has just loaded it from."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, local_files_only=True))
    return checkpoint.read(folder)
