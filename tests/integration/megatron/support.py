"""Tiny random models of awkward shapes, batches of ragged groups, and Hugging Face as the independent reference."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from services.trainer.backends.base import StepResult
from services.trainer.backends.megatron import distributed
from services.trainer.backends.megatron.backend import MegatronBackend
from services.trainer.batch import Batch, Normalizer
from trireme.config import Config

VOCAB = 307
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
    "gemma3": Gemma3TextConfig,
}


def make_model(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A Hugging Face folder with random weights, biases and norms (all far from their initial values)."""
    generator = torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**{**LLAMA, **changes}), dtype=torch.float32)
    gain = 0.0 if family == "gemma3" else 1.0  # of a norm: Gemma's add 1 to it
    for name, weight in model.named_parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.2 + (gain if "norm" in name else 0.0)
    model.save_pretrained(folder)
    return folder


def load_reference(folder: Path, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    # Grouped matrix products know no float64.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def make_config(folder: Path, changes: dict[str, Any] | None = None) -> Config:
    """A configuration for `folder` in float32, with `{"a.b.c": value}` put in."""
    tree: dict[str, Any] = {
        "policy.model_name": str(folder),
        "policy.precision": "float32",
        "policy.max_total_sequence_length": 24,
        "policy.train_micro_batch_size": 2,
        "policy.megatron_cfg.enabled": True,
        "policy.megatron_cfg.optimizer.lr": 1e-3,
        "policy.megatron_cfg.optimizer.min_lr": 0.0,
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 0,
        "policy.generation.max_new_tokens": 8,
        "loss_fn.reference_policy_kl_penalty": 0.0,
        "data.dataset_name": "reasoning_gym/chain_sum",
        "data.max_input_seq_length": 16,
        **(changes or {}),
    }
    nested: dict[str, Any] = {}
    for path, value in tree.items():
        *parents, leaf = path.split(".")
        block = nested
        for parent in parents:
            block = block.setdefault(parent, {})
        block[leaf] = value
    return Config.model_validate(nested)


# One step's weights are then the old ones minus the gradient: Adam without memory, whose eps dwarfs its denominator.
PLAIN_GRADIENT: dict[str, Any] = {
    "policy.megatron_cfg.optimizer.lr": 2.0**30,
    "policy.megatron_cfg.optimizer.adam_eps": 2.0**30,
    "policy.megatron_cfg.optimizer.adam_beta1": 0.0,
    "policy.megatron_cfg.optimizer.adam_beta2": 0.0,
    "policy.megatron_cfg.optimizer.weight_decay": 0.0,
    "policy.max_grad_norm": 0.0,
}


def make_batch(groups: list[tuple[int, list[int]]], seed: int = 0, holes: bool = True) -> Batch:
    """Groups of (prompt length, response lengths). With `holes`, some response tokens carry no gradient."""
    generator = torch.Generator().manual_seed(seed)
    tokens, mask, prompt_lengths, group = [], [], [], []
    for number, (prompt_length, responses) in enumerate(groups):
        prompt = torch.randint(VOCAB, (prompt_length,), generator=generator)
        for length in responses:
            tokens += [prompt, torch.randint(VOCAB, (length,), generator=generator)]
            trained = torch.rand(length, generator=generator) > (0.2 if holes else -1.0)
            mask += [torch.zeros(prompt_length, dtype=torch.bool), trained]
            prompt_lengths.append(prompt_length)
            group.append(number)
    loss_mask, count = torch.cat(mask), len(group)
    lengths = torch.tensor([len(tokens[2 * i]) + len(tokens[2 * i + 1]) for i in range(count)])
    noise = torch.randn(2, len(loss_mask), generator=generator) * loss_mask
    return Batch(
        tokens=torch.cat(tokens),
        lengths=lengths,
        prompt_lengths=torch.tensor(prompt_lengths),
        group=torch.tensor(group),
        age=torch.zeros(count, dtype=torch.int64),
        loss_mask=loss_mask,
        generation_log_probs=noise[0] * 0.1 - 5.0 * loss_mask,
        advantages=noise[1],
    )


def ragged_batch(seed: int = 0) -> Batch:
    """Nine sequences in four groups, the last of which has one member and no trained token."""
    batch = make_batch([(5, [7, 1, 12]), (11, [3, 9]), (1, [6, 2, 4]), (8, [5])], seed)
    mask = batch.loss_mask.clone()
    mask[batch.token_positions(torch.tensor([8]))] = False
    return dataclasses.replace(batch, loss_mask=mask, advantages=batch.advantages * mask)


def policy_gradient(log_probs: Tensor, batch: Batch, normalizer: Normalizer) -> tuple[Tensor, dict[str, Tensor]]:
    """An objective with all that matters: a ratio, a term that is not linear in it, a token count."""
    old = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    ratio = torch.exp(log_probs - old)
    loss = (-ratio * batch.advantages + 0.1 * (log_probs + 5) ** 2) * batch.loss_mask
    return loss.sum() / normalizer.tokens, {
        "ratio": (ratio.detach() * batch.loss_mask).sum() / normalizer.tokens,
        "tokens": batch.loss_mask.sum().float(),
    }


def reference_log_probs(model: torch.nn.Module, batch: Batch, temperature: float = 1.0) -> Tensor:
    """One sequence at a time, unpacked and unpadded; 0 where nothing is trained."""
    parts = []
    for index in range(len(batch)):
        tokens = batch.select(torch.tensor([index])).tokens
        logits = model(tokens[None]).logits[0, :-1] / temperature
        chosen = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        parts += [chosen.new_zeros(1), chosen]
    return torch.cat(parts) * batch.loss_mask


def reference_backward(model: torch.nn.Module, batch: Batch) -> None:
    """The gradients of `policy_gradient` on the whole batch at once, by autograd through Hugging Face."""
    model.zero_grad()
    loss, _ = policy_gradient(reference_log_probs(model, batch), batch, batch.normalizer())
    loss.backward()


def reference_gradients(model: torch.nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Those of `reference_backward`, in place of the weights, under the names that these have in files (in memory,
    experts are fused)."""
    reference_backward(model, batch)
    for weight in model.parameters():
        weight.data, weight.grad = weight.grad, None
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def weights_of(backend: MegatronBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.tensors()}


def one_step(folder: Path, batch: Batch, changes: dict[str, Any]) -> tuple[StepResult, dict[str, Tensor]]:
    """The result of a step and the weights after it, from a fresh backend."""
    backend = MegatronBackend(make_config(folder, changes), folder)
    result = backend.step(batch, policy_gradient)
    return result, weights_of(backend)


def of_the_batch(metrics: dict[str, float]) -> dict[str, float]:
    """Without what says how the ranks shared the work."""
    return {name: value for name, value in metrics.items() if not name.startswith("packing_")}


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-12))


def run_ranks(count: int, function: Callable[..., Any], *args: Any) -> None:
    """`function(rank, *args)` in `count` processes that form one trainer."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_ranked, args=(count, port, function, args), nprocs=count)


def _ranked(rank: int, count: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(count),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    try:
        function(rank, *args)
    finally:
        distributed.shutdown()
