"""A small tokenizer and datasets, made here rather than downloaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from services.trainer.data.base import Item, Task

SPECIAL = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_BOS = TEMPLATE.replace("{{ bos_token }}", "")
TWO_BOS = "{{ bos_token }}" + TEMPLATE


def tokenizer(template: str | None = TEMPLATE, *, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """Bytes as tokens; like many real ones it puts a BOS before every text unless told not to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(SPECIAL)
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast


@dataclass(frozen=True)
class Settings:
    """The `data` block as far as the sampler and the loader read it."""

    dataset_name: str = "memory"
    dataset: dict[str, Any] = field(default_factory=dict)
    train_file: str | None = None
    validation_file: str | None = None
    num_validation: int = 0
    max_input_seq_length: int | None = None
    prompt_file: str | None = None
    system_prompt: str | None = None
    system_prompt_file: str | None = None
    verifier: str | None = None
    shuffle: bool = True


def items(*prompts: str) -> list[Item]:
    return [Item([{"role": "user", "content": p}], Task("exact", {"answer": p}), i) for i, p in enumerate(prompts)]
