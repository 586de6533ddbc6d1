"""Tiny random Llama folders with awkward shapes, and their forward pass in Hugging Face as the reference."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS, END_OF_TURN = 256, 257, 258
# Neither a multiple of vLLM's vocabulary padding (64) nor the tokenizer's size (259).
VOCAB = 301


@dataclass(frozen=True)
class TinyModel:
    """A model folder. `fresh` gives other weights of the same shapes."""

    folder: Path
    config: LlamaConfig

    def fresh(self, seed: int) -> LlamaForCausalLM:
        return make_weights(self.config, seed)


def make_model(folder: Path, *, tied: bool, generation_config: dict[str, Any] | None = None, **shape: int) -> TinyModel:
    awkward: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 172,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
    }
    ends: dict[str, Any] = {"bos_token_id": BOS, "eos_token_id": EOS, "dtype": "float32"}
    config = LlamaConfig(**awkward | shape, tie_word_embeddings=tied, **ends)
    make_weights(config, seed=0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    content = {"bos_token_id": BOS, "eos_token_id": EOS, **(generation_config or {})}
    (folder / "generation_config.json").write_text(json.dumps(content))
    return TinyModel(folder, config)


def make_weights(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """Weights large enough that distributions are far from uniform and versions far from each other."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def named_tensors(model: LlamaForCausalLM) -> list[tuple[str, Tensor]]:
    """As a trainer publishes them: a tied head is sent once, as the embedding."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@torch.inference_mode()
def reference_log_probs(
    model: LlamaForCausalLM, prompt: list[int], response: list[int], temperature: float = 1.0
) -> Tensor:
    """float32 [len(response)]: log-prob of each response token under log_softmax(logits / temperature)."""
    logits = model(torch.tensor([prompt + response])).logits[0].float() / temperature
    log_probs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return log_probs.gather(-1, torch.tensor(response)[:, None])[:, 0]
