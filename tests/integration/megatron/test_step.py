"""One step: gradients, update, schedule, and what happens to a batch that cannot be trained on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from services.trainer.backends.megatron.backend import MegatronBackend
from services.trainer.batch import Batch, Normalizer
from tests.integration.megatron.support import (
    PLAIN_GRADIENT,
    load_reference,
    make_config,
    make_model,
    of_the_batch,
    one_step,
    policy_gradient,
    ragged_batch,
    reference_backward,
    reference_gradients,
    reference_log_probs,
    relative,
    weights_of,
)
from tests.integration.megatron.test_parity import SHAPES

SIZES: dict[str, dict[str, Any]] = {
    "all in one": {"policy.sequence_packing.train_mb_tokens": 4096},
    "24 tokens": {"policy.sequence_packing.train_mb_tokens": 24},
    "one sequence": {"policy.sequence_packing.enabled": False, "policy.train_micro_batch_size": 1},
    "two sequences": {"policy.sequence_packing.enabled": False, "policy.train_micro_batch_size": 2},
    "four sequences": {"policy.sequence_packing.enabled": False, "policy.train_micro_batch_size": 4},
    "recomputed": {"policy.megatron_cfg.activation_checkpointing": True},
}


def step_once(folder: Path, changes: dict[str, Any] | None = None) -> tuple[MegatronBackend, Any]:
    backend = MegatronBackend(make_config(folder, changes), folder)
    return backend, backend.step(ragged_batch(), policy_gradient)


FAMILIES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False, "head_dim": 12},
    "biases": {"attention_bias": True, "mlp_bias": True},
    **{name: SHAPES[name] for name in ("Qwen2", "Qwen3", "Qwen3-MoE renormalised", "Mixtral", "Gemma-3")},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", ["all in one", "24 tokens"])
def test_gradients_equal_autograd_through_hugging_face(family: str, size: str, tmp_path: Path) -> None:
    """L-03; M-10: those of a router that is trained, too."""
    folder = make_model(tmp_path, **FAMILIES[family])
    before = load_file(folder / "model.safetensors")
    changes = {**PLAIN_GRADIENT, **SIZES[size], "policy.megatron_cfg.freeze_moe_router": False}
    result, after = one_step(folder, ragged_batch(), changes)
    expected = reference_gradients(load_reference(folder), ragged_batch())
    for name, gradient in expected.items():
        assert relative(before[name] - after[name], gradient) <= 2e-5, name
    norm = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt()
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("size", list(SIZES)[1:])
def test_the_size_of_micro_batches_changes_nothing(size: str, tiny: Path) -> None:
    """L-03, M-07"""
    whole, whole_weights = one_step(tiny, ragged_batch(), {**PLAIN_GRADIENT, **SIZES["all in one"]})
    split, split_weights = one_step(tiny, ragged_batch(), {**PLAIN_GRADIENT, **SIZES[size]})
    assert split.loss == pytest.approx(whole.loss, rel=1e-5)
    assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    assert of_the_batch(split.metrics) == pytest.approx(of_the_batch(whole.metrics), rel=1e-5)
    assert float((split.log_probs - whole.log_probs).abs().max()) <= 1e-5
    assert all(relative(split_weights[name], whole_weights[name]) <= 1e-5 for name in whole_weights)


def test_a_step_equals_adamw_on_hugging_face(tiny: Path) -> None:
    """C-08 too: the first step takes the whole rate. Norms and biases do not decay, as in Megatron."""
    rate, decay = 1e-2, 0.1
    changes = {
        "policy.megatron_cfg.optimizer.lr": rate,
        "policy.megatron_cfg.optimizer.weight_decay": decay,
        "policy.max_grad_norm": 0.5,
    }
    backend = MegatronBackend(make_config(tiny, changes), tiny)
    model = load_reference(tiny)
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    # Adam divides by the gradient's own size: its eps decides where that is lost in rounding.
    optimizer = torch.optim.AdamW(groups, lr=rate, eps=1e-8)
    for seed in range(3):
        result = backend.step(ragged_batch(seed), policy_gradient)
        reference_backward(model, ragged_batch(seed))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert result.learning_rate == pytest.approx(rate)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
    ours, theirs = weights_of(backend), dict(model.named_parameters())
    for name, tensor in ours.items():
        error = (tensor - theirs[name]).abs()
        assert float(error.mean()) <= 1e-3 * rate, name


def test_a_step_at_rate_zero_leaves_the_loaded_weights(tiny: Path) -> None:
    """M-11"""
    source = load_file(tiny / "model.safetensors")
    result, weights = one_step(tiny, ragged_batch(), {"policy.megatron_cfg.optimizer.lr": 0.0} | NO_WARM_UP)
    assert result.applied
    assert all(torch.equal(weights[name], source[name]) for name in source)


NO_WARM_UP: dict[str, Any] = {"policy.megatron_cfg.scheduler.lr_warmup_init": 0.0}


def test_bfloat16_weights_have_float32_masters(tiny: Path) -> None:
    """M-11: updates far below a bfloat16 step add up in the masters until the weights move."""
    changes = {"policy.precision": "bfloat16", "policy.megatron_cfg.optimizer.lr": 4e-4} | NO_WARM_UP
    backend = MegatronBackend(make_config(tiny, changes), tiny)
    before = weights_of(backend)["model.norm.weight"]
    for _ in range(2):
        backend.step(ragged_batch(), policy_gradient)
    assert torch.equal(weights_of(backend)["model.norm.weight"], before)
    for _ in range(16):
        backend.step(ragged_batch(), policy_gradient)
    moved = (weights_of(backend)["model.norm.weight"].float() - before.float()).abs()
    assert 3e-3 <= float(moved.max()) <= 3e-2


def test_clipping_acts_on_what_updates_the_masters(tiny: Path) -> None:
    """M-06: of bfloat16 weights, it is the float32 copies of their gradients that have to be clipped."""
    changes = {**PLAIN_GRADIENT, "policy.precision": "bfloat16", "policy.max_grad_norm": 0.1}
    backend = MegatronBackend(make_config(tiny, changes), tiny)
    before = masters(backend)
    result = backend.step(ragged_batch(), policy_gradient)
    moved = torch.cat([(new - old).flatten() for new, old in zip(masters(backend), before, strict=True)])
    assert result.grad_norm > 1
    assert float(moved.norm()) == pytest.approx(0.1, rel=1e-3)


def masters(backend: MegatronBackend) -> list[Tensor]:
    groups = [group for part in backend.trainable.parts() for group in part.shard_fp32_from_float16_groups]
    return [master.detach().clone() for group in groups for master in group]


def test_warm_up_and_decay(tiny: Path) -> None:
    """C-08, C-09"""
    changes = {
        "policy.megatron_cfg.optimizer.lr": 1e-3,
        "policy.megatron_cfg.optimizer.min_lr": 1e-4,
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 2,
        "policy.megatron_cfg.scheduler.lr_warmup_init": 2e-4,
        "policy.megatron_cfg.scheduler.lr_decay_style": "linear",
        "policy.megatron_cfg.scheduler.lr_decay_iters": 5,
    }
    backend = MegatronBackend(make_config(tiny, changes), tiny)
    rates = [backend.step(ragged_batch(), policy_gradient).learning_rate for _ in range(7)]
    assert rates == pytest.approx([2e-4, 6e-4, 1e-3, 7e-4, 4e-4, 1e-4, 1e-4])


def test_what_a_schedule_does_not_use_is_of_no_effect(tiny: Path) -> None:
    block = "policy.megatron_cfg"
    unused = {f"{block}.scheduler.lr_warmup_init": 1.0, f"{block}.optimizer.min_lr": 1.0}
    backend = MegatronBackend(make_config(tiny, unused), tiny)
    assert backend.step(ragged_batch(), policy_gradient).learning_rate == 1e-3


def test_the_first_ratio_is_one(tiny: Path) -> None:
    """P-15, L-17: log-probs of a pass in eval mode are those of the step."""
    backend, batch = MegatronBackend(make_config(tiny), tiny), ragged_batch()
    stored = batch.with_log_probs(old=backend.log_probs(batch))
    result = backend.step(stored, policy_gradient)
    trained = float(batch.loss_mask.sum())
    assert of_the_batch(result.metrics) == {"ratio": pytest.approx(1, abs=1e-6), "tokens": trained}
    assert float((result.log_probs - stored.old_log_probs).abs().max()) <= 1e-5


def test_log_probs_do_not_change_what_a_step_does(tiny: Path) -> None:
    _, expected = one_step(tiny, ragged_batch(), {})
    backend = MegatronBackend(make_config(tiny), tiny)
    backend.log_probs(ragged_batch(1))
    backend.step(ragged_batch(), policy_gradient)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in backend.tensors())


def test_nothing_to_train_on(tiny: Path) -> None:
    """L-02, K-13: zero loss, zero gradient, finite weights."""
    batch = ragged_batch()
    empty = dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    backend = MegatronBackend(make_config(tiny), tiny)
    result = backend.step(empty, policy_gradient)
    assert (result.loss, result.grad_norm, result.applied) == (0.0, 0.0, True)
    assert all(bool(tensor.isfinite().all()) for _, tensor in backend.tensors())
    assert not backend.log_probs(empty).any()


def broken(log_probs: Tensor, batch: Batch, normalizer: Normalizer) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = policy_gradient(log_probs, batch, normalizer)
    return loss * float("nan"), metrics


def test_a_gradient_that_is_not_finite_skips_the_step(tiny: Path) -> None:
    """Weights, moments, schedule: as if it had not been."""
    backend = MegatronBackend(make_config(tiny), tiny)
    before = weights_of(backend)
    result = backend.step(ragged_batch(), broken)
    assert not result.applied
    assert result.grad_norm != result.grad_norm
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.tensors())
    _, expected = one_step(tiny, ragged_batch(), {})
    assert backend.step(ragged_batch(), policy_gradient).applied
    assert all(torch.equal(tensor, expected[name]) for name, tensor in backend.tensors())


def test_the_reference_stays_what_it_was(tiny: Path) -> None:
    changes = {"loss_fn.reference_policy_kl_penalty": 0.1}
    backend, batch = MegatronBackend(make_config(tiny, changes), tiny), ragged_batch()
    first = backend.log_probs(batch, "reference")
    with torch.no_grad():
        assert float((first - reference_log_probs(load_reference(tiny), batch)).abs().max()) <= 1e-4
    backend.step(batch, policy_gradient)
    assert torch.equal(backend.log_probs(batch, "reference"), first)
    assert not torch.equal(backend.log_probs(batch), first)


def test_without_a_penalty_there_is_no_reference(tiny: Path) -> None:
    with pytest.raises(ValueError, match="reference_policy_kl_penalty is 0"):
        MegatronBackend(make_config(tiny), tiny).log_probs(ragged_batch(), "reference")
