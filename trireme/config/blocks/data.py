"""`data`: which prompts are trained on, which are held out, and how they are worded."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from trireme.config.base import Block, ref


class DataConfig(Block):
    """Prompts and their answers."""

    dataset_name: str = Field(
        min_length=1,
        description="`reasoning_gym/<task>`, a path that ends in .jsonl, or the name or folder of a Hugging Face "
        "dataset.",
    )
    dataset: dict[str, Any] = Field(
        default_factory=dict, description="Parameters of the dataset, such as the options of a reasoning-gym task."
    )
    train_file: str | None = Field(None, description="JSONL file of training prompts; null takes dataset_name.")
    validation_file: str | None = Field(
        None, description="JSONL file of held-out prompts; null holds out items of the training data."
    )
    num_validation: int = Field(ref("grpo.max_val_samples"), ge=0, description="Number of prompts held out.")
    max_input_seq_length: int = Field(
        ref("policy.generation.vllm_cfg.max_model_len"),
        ge=1,
        description="Longest prompt, in tokens; longer ones are skipped and counted. Where it equals max_model_len, it "
        "becomes what max_new_tokens leaves of that (all but one token, where that is the whole context too).",
    )
    prompt_file: str | None = Field(
        None, description="Text file with a `{}` where the problem goes; null leaves the problem as it is."
    )
    system_prompt_file: str | None = Field(None, description="Text file with the system message.")
    system_prompt: str | None = Field(None, description="The system message itself; excludes system_prompt_file.")
    verifier: str | None = Field(None, description="Name of the verifier that scores answers; null lets the data say.")
    shuffle: bool = Field(True, description="Shuffle training prompts anew in each epoch, by grpo.seed.")
