"""Shorthands for generating, and the comparison with Hugging Face that everything here rests on."""

from __future__ import annotations

import uuid
from typing import Any

import torch
from transformers import LlamaForCausalLM

from services.rollout.engine import Completion, Request
from services.rollout.vllm_engine import VllmEngine
from tests.integration.rollout.models import reference_log_probs
from trireme.contracts.v1.sample_pb2 import Prompt, SamplingParams

# Measured: below 1e-5 in float32. A stale head or cache is off by whole nats.
TOLERANCE = 1e-4
# Longer than several cache blocks, so that a stale prefix would be found and used.
SHARED_PROMPT = [(7 * i + 3) % 250 for i in range(200)]


async def complete(engine: VllmEngine, prompt: list[int], **changes: Any) -> Completion:
    fields: dict[str, Any] = {"id": uuid.uuid4().hex, "seed": 1, "max_new_tokens": 16, **changes}
    events = [e async for e in engine.generate(Request(prompt_token_ids=tuple(prompt), **fields))]
    assert len(events) == 1 and isinstance(events[0], Completion)
    return events[0]


def worst_difference(
    weights: LlamaForCausalLM, prompt: list[int], completion: Completion, temperature: float = 1.0
) -> float:
    """Largest difference of a log-prob from Hugging Face's, in nats."""
    expected = reference_log_probs(weights, prompt, list(completion.token_ids), temperature)
    return float((torch.tensor(completion.log_probs) - expected).abs().max())


def group(prompt: list[int], **changes: Any) -> Prompt:
    """A Prompt message of two samples; `sampling` keys may be given directly."""
    keys = {f.name for f in SamplingParams.DESCRIPTOR.fields}
    sampling = {"temperature": 1.0, "max_new_tokens": 8, "seed": 4} | {k: v for k, v in changes.items() if k in keys}
    fields = {"group_id": uuid.uuid4().hex, "num_samples": 2, "token_ids": prompt}
    fields |= {k: v for k, v in changes.items() if k not in keys}
    return Prompt(sampling=SamplingParams(**sampling), **fields)
