"""Rules about lengths: what one prompt, one response, one context and one micro-batch hold, in tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trireme.config.rules.registry import Rule, rule_into

if TYPE_CHECKING:
    from trireme.config.root import Config

RULES: list[Rule] = []
rule = rule_into(RULES)
CONTEXT = "policy.generation.vllm_cfg.max_model_len"
RESPONSE = "policy.generation.max_new_tokens"
PROMPT = "data.max_input_seq_length"
SEQUENCE = "policy.max_total_sequence_length"
CONTEXT_PARALLEL = "policy.megatron_cfg.context_parallel_size"


@rule("prompt-and-response-fit-context")
def _fit_context(config: Config) -> Iterator[str]:
    """A prompt and a response fit the context; a response as long as the context means: what the prompt leaves."""
    context = config.policy.generation.vllm_cfg.max_model_len
    prompt, response = config.data.max_input_seq_length, config.policy.generation.max_new_tokens
    for key, length in ((PROMPT, prompt), (RESPONSE, response)):
        if length > context:
            yield f"{key} ({length}) is longer than {CONTEXT} ({context}): at most {context}"
    if prompt <= context and response < context < prompt + response:
        yield (
            f"{PROMPT} ({prompt}) + {RESPONSE} ({response}) = {prompt + response} does not fit {CONTEXT} ({context}): "
            f"{RESPONSE}={context - prompt}, or {CONTEXT}={prompt + response}"
        )


@rule("context-fits-training")
def _fit_training(config: Config) -> Iterator[str]:
    """A context is not longer than a training sequence."""
    context, sequence = config.policy.generation.vllm_cfg.max_model_len, config.policy.max_total_sequence_length
    if context > sequence:
        yield (
            f"{CONTEXT} ({context}) is longer than {SEQUENCE} ({sequence}), so that samples would not fit in training: "
            f"{CONTEXT}={sequence}, or {SEQUENCE}={context}"
        )


@rule("micro-batch-holds-a-sequence")
def _micro_batch(config: Config) -> Iterator[str]:
    """A micro-batch holds at least one sequence of the longest kind, filled up to what context parallelism needs."""
    sequence, context = config.policy.max_total_sequence_length, config.policy.megatron_cfg.context_parallel_size
    chunks = 2 * context if context > 1 else 1
    needed = max(sequence, -(-(sequence - 1) // chunks) * chunks)  # nothing is computed for the last token
    filled = f", which {CONTEXT_PARALLEL}={context} fills up to {needed}" if needed > sequence else ""
    for name in ("sequence_packing", "dynamic_batching"):
        block = getattr(config.policy, name)
        for key in ("train_mb_tokens", "logprob_mb_tokens"):
            if block.enabled and getattr(block, key) < needed:
                yield (
                    f"policy.{name}.{key} ({getattr(block, key)}) holds no sequence of {SEQUENCE} ({sequence})"
                    f"{filled}: at least {needed}"
                )


@rule("overlong-buffer")
def _overlong(config: Config) -> Iterator[str]:
    """The overlong buffer is not longer than the longest response."""
    shaping = config.grpo.reward_shaping
    if shaping.enabled and shaping.overlong_buffer_length > shaping.max_response_length:
        yield (
            f"grpo.reward_shaping.overlong_buffer_length ({shaping.overlong_buffer_length}) is longer than "
            f"grpo.reward_shaping.max_response_length ({shaping.max_response_length}): at most that"
        )
