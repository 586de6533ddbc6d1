"""From a prepared prompt to the Prompt message of one group."""

from __future__ import annotations

import json
from collections.abc import Sequence

from services.trainer.data.sampler import PreparedPrompt
from trireme.config import Config
from trireme.contracts.ids import new_trace_id
from trireme.contracts.v1 import sample_pb2

# Validation draws from a stream of its own, far from those of training.
VALIDATION_SEED_OFFSET = 1 << 40


def sampling_params(config: Config, *, seed: int, greedy: bool = False) -> sample_pb2.SamplingParams:
    """The generation block as a message; `greedy` turns temperature and filters off."""
    generation = config.policy.generation
    return sample_pb2.SamplingParams(
        temperature=0.0 if greedy else generation.temperature,
        top_p=1.0 if greedy else generation.top_p,
        top_k=0 if greedy else (generation.top_k or 0),
        max_new_tokens=generation.max_new_tokens,
        stop_token_ids=generation.stop_token_ids or [],
        stop_strings=generation.stop_strings or [],
        seed=seed,
        ignore_eos=generation.ignore_eos,
    )


def training_prompt(config: Config, prepared: PreparedPrompt, *, serial: int, version: int) -> sample_pb2.Prompt:
    """The group request of one training prompt. `serial` counts the prompts admitted by this run, from 0."""
    prompt = _prompt(config, prepared, group_id=f"{config.run.name}-{serial}", dataset_split="train")
    prompt.num_samples = config.grpo.num_generations_per_prompt
    # A group's seed depends on the run's seed and its serial only: a repeated attempt draws the same samples.
    prompt.sampling.CopyFrom(sampling_params(config, seed=(config.grpo.seed << 32) + serial))
    prompt.admitted_version = version
    prompt.min_weight_version = version
    return prompt


def validation_prompts(config: Config, prepared: Sequence[PreparedPrompt]) -> list[sample_pb2.Prompt]:
    """Greedy single-sample requests."""
    prompts = []
    for number, item in enumerate(prepared):
        prompt = _prompt(config, item, group_id=f"{config.run.name}-validation-{number}", dataset_split="validation")
        prompt.num_samples = 1
        prompt.sampling.CopyFrom(sampling_params(config, seed=VALIDATION_SEED_OFFSET + number, greedy=True))
        prompts.append(prompt)
    return prompts


def _prompt(config: Config, prepared: PreparedPrompt, *, group_id: str, dataset_split: str) -> sample_pb2.Prompt:
    task = prepared.item.task
    return sample_pb2.Prompt(
        group_id=group_id,
        token_ids=prepared.token_ids,
        text=prepared.text,
        ref=sample_pb2.PromptRef(
            dataset=config.data.dataset_name, split=dataset_split, index=prepared.index, epoch=prepared.epoch
        ),
        task=sample_pb2.Task(verifier=task.verifier, payload_json=json.dumps(task.payload)),
        trace_id=new_trace_id(),
    )
