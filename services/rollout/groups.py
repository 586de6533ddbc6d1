"""From a Prompt to its Samples: checking, seeds, and the samples of a group generated side by side."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator

from services.rollout.engine import Completion, Delta, Engine, EngineError, Request
from trireme.contracts import samples
from trireme.contracts.errors import ContractError
from trireme.contracts.ids import sample_id
from trireme.contracts.v1 import sample_pb2
from trireme.contracts.v1.rollout_pb2 import TokenDelta

FINISH = {
    "stop": sample_pb2.FINISH_REASON_STOP,
    "length": sample_pb2.FINISH_REASON_LENGTH,
    "aborted": sample_pb2.FINISH_REASON_ABORTED,
}
# vLLM takes seeds up to 2**63 - 1; PyTorch's CPU generator uses the lower 32 bits only.
SEED_BITS = 63


class InvalidPrompt(ValueError):
    """The prompt can never be generated from; the message names the field and what would be right."""


def seed_of(group_seed: int, index: int) -> int:
    """The seed of sample `index`: reproducible, and unrelated to the seeds of its neighbours."""
    digest = hashlib.blake2b(f"{group_seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def check(prompt: sample_pb2.Prompt, engine: Engine) -> None:
    """Raise InvalidPrompt unless `engine` can generate from `prompt` as it is; nothing is ever truncated."""
    sampling, length = prompt.sampling, len(prompt.token_ids)
    if not prompt.group_id:
        raise InvalidPrompt("group_id is empty")
    if prompt.num_samples < 1:
        raise InvalidPrompt("num_samples is 0; must be at least 1")
    if not length:
        raise InvalidPrompt("token_ids is empty")
    if length >= engine.max_model_len:
        raise InvalidPrompt(
            f"token_ids has {length} tokens, and max_model_len {engine.max_model_len} must hold at least one more"
        )
    if (largest := max(prompt.token_ids)) >= engine.vocab_size:
        raise InvalidPrompt(f"token_ids contains {largest}, the vocabulary has {engine.vocab_size} tokens")
    if sampling.max_new_tokens < 1:
        raise InvalidPrompt("sampling.max_new_tokens is 0; must be at least 1")
    if not sampling.HasField("temperature"):
        raise InvalidPrompt("sampling.temperature is not set; must be 0 (greedy) or in [0.01, 2]")
    # Written so that NaN fails too. Between 0 and 0.01 vLLM would silently sample at 0.01, which is less in float32.
    if not (sampling.temperature == 0 or 0.0099999 <= sampling.temperature <= 2):
        raise InvalidPrompt(f"sampling.temperature is {sampling.temperature}; must be 0 (greedy) or in [0.01, 2]")
    if not 0 <= sampling.top_p <= 1:
        raise InvalidPrompt(f"sampling.top_p is {sampling.top_p}; must be in [0, 1]")
    if any(not text for text in sampling.stop_strings):
        raise InvalidPrompt("sampling.stop_strings contains an empty string")


async def generate(
    engine: Engine, prompt: sample_pb2.Prompt, server: str, *, stream: bool = False
) -> AsyncIterator[TokenDelta | sample_pb2.Sample]:
    """The group's samples as they finish, and between them token deltas if `stream`.

    `prompt` has passed `check`. Closing the iterator, or an error in one sample (EngineError), aborts them all.
    """
    events: asyncio.Queue[TokenDelta | sample_pb2.Sample | None] = asyncio.Queue()

    async def one(index: int) -> None:
        async for event in engine.generate(request(prompt, index), stream=stream):
            events.put_nowait(_event(prompt, index, event, server))

    async def all_of_them() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(prompt.num_samples):
                    group.create_task(one(index))
        finally:
            events.put_nowait(None)

    running = asyncio.create_task(all_of_them())
    try:
        while (event := await events.get()) is not None:
            yield event
        await running
    except* EngineError as errors:
        raise _first(errors) from errors
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def request(prompt: sample_pb2.Prompt, index: int) -> Request:
    """The request for sample `index`. Its id is new for every attempt: the one before may still be aborting."""
    sampling = prompt.sampling
    return Request(
        id=f"{sample_id(prompt.group_id, index)}#{uuid.uuid4().hex[:8]}",
        prompt_token_ids=tuple(prompt.token_ids),
        seed=seed_of(sampling.seed, index),
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k,
        stop_token_ids=tuple(sampling.stop_token_ids),
        stop_strings=tuple(sampling.stop_strings),
        ignore_eos=sampling.ignore_eos,
    )


def _event(
    prompt: sample_pb2.Prompt, index: int, event: Delta | Completion, server: str
) -> TokenDelta | sample_pb2.Sample:
    if isinstance(event, Delta):
        return TokenDelta(group_index=index, token_ids=event.token_ids, log_probs=event.log_probs)
    if event.finish == "aborted":
        raise EngineError(f"sample {sample_id(prompt.group_id, index)} was aborted by the engine")
    return sample(prompt, index, event, server)


def sample(prompt: sample_pb2.Prompt, index: int, completion: Completion, server: str) -> sample_pb2.Sample:
    """The Sample of a completion. Raises EngineError when it breaks the contract, such as a log-prob that is NaN."""
    length = len(completion.token_ids)
    made = sample_pb2.Sample(
        id=sample_id(prompt.group_id, index),
        group_id=prompt.group_id,
        group_index=index,
        group_size=prompt.num_samples,
        prompt_token_ids=prompt.token_ids,
        response_token_ids=completion.token_ids,
        log_probs=completion.log_probs,
        versions=completion.versions,
        loss_spans=[sample_pb2.Span(start=0, length=length)] if length else [],
        finish_reason=FINISH[completion.finish],
        ref=prompt.ref if prompt.HasField("ref") else None,
        task=prompt.task if prompt.HasField("task") else None,
        trace_id=prompt.trace_id,
        prompt_text=prompt.text,
        response_text=completion.text,
        temperature=prompt.sampling.temperature,
        rollout_server=server,
        admitted_version=prompt.admitted_version,
    )
    try:
        samples.validate(made)
    except ContractError as error:
        raise EngineError(f"sample {made.id}: {error}") from error
    return made


def _first(errors: BaseExceptionGroup[EngineError]) -> EngineError:
    found = errors.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
