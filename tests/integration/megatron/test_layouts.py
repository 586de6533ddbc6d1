"""Every layout of ranks does what one process does: loss, metrics, log-probs, grad norm, the weights after a step.

All layouts of one size run in the same processes, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file
from torch import Tensor

from services.trainer.backends.base import StepResult
from services.trainer.backends.megatron import distributed
from services.trainer.backends.megatron.backend import MegatronBackend
from services.trainer.batch import Batch
from tests.integration.megatron.support import (
    PLAIN_GRADIENT,
    make_config,
    make_model,
    of_the_batch,
    one_step,
    policy_gradient,
    ragged_batch,
    relative,
    run_ranks,
    weights_of,
)

# Key words of the layout, and what they stand for.
KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "sp": "sequence_parallel",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"num_hidden_layers": 4},
    "untied, one KV head": {"num_hidden_layers": 4, "num_key_value_heads": 1, "tie_word_embeddings": False},
    "biases": {"num_hidden_layers": 4, "attention_bias": True, "mlp_bias": True},
    "thirds": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "intermediate_size": 96},
    "one KV head of four": {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64},
    "Qwen3-MoE": {
        "family": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "Mixtral": {"family": "mixtral", "num_hidden_layers": 4, "num_local_experts": 4, "tie_word_embeddings": False},
    "QK norms": {"family": "qwen3", "num_hidden_layers": 4, "head_dim": 16},
    # With two kinds of layers, whose windows end inside of the sequences.
    "Gemma-3": {
        "family": "gemma3",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 6,
        "query_pre_attn_scalar": 20,
        "head_dim": 12,
    },
}


@dataclass(frozen=True)
class Case:
    """A layout for a model, and what else is set."""

    ranks: int
    model: str
    layout: dict[str, int]
    shared: bool = False
    temperature: float = 1.0
    recompute: bool = False

    @property
    def changes(self) -> dict[str, Any]:
        more = {"trainer.shared_prefix": self.shared, "policy.megatron_cfg.activation_checkpointing": self.recompute}
        return {**PLAIN_GRADIENT, **self.layout_changes, **more, **sampled_at(self.temperature)}

    @property
    def layout_changes(self) -> dict[str, Any]:
        layout = {f"policy.megatron_cfg.{KEYS[key]}": value for key, value in self.layout.items()}
        ranks = {"trainer.nproc": self.ranks}
        return {**PACKED, **layout, **ranks}

    def __str__(self) -> str:
        layout = " ".join(f"{key}{int(value)}" for key, value in self.layout.items()) or "dp"
        more = {", prompts shared": self.shared, ", recomputed": self.recompute, ", cooler": self.temperature < 1}
        return f"{self.model}: {layout}" + "".join(name for name, wanted in more.items() if wanted)


def sampled_at(temperature: float) -> dict[str, Any]:
    return {"policy.generation.temperature": temperature}


PACKED = {"policy.sequence_packing.enabled": True, "policy.sequence_packing.train_mb_tokens": 40}
CASES = [
    Case(2, "tied", {"tp": 2}),
    Case(2, "tied", {"tp": 2, "sp": True}),
    Case(2, "untied, one KV head", {"tp": 2, "sp": True}),
    Case(2, "biases", {"tp": 2, "sp": True}),
    Case(2, "QK norms", {"tp": 2}),
    Case(2, "QK norms", {"tp": 2, "sp": True}),
    Case(2, "tied", {"pp": 2}),
    Case(2, "tied", {"pp": 2, "first": 1}),
    Case(2, "untied, one KV head", {"pp": 2, "last": 1}),
    Case(2, "tied", {"pp": 2, "vp": 2}),
    Case(2, "tied", {"cp": 2}),
    Case(2, "QK norms", {"cp": 2}),
    Case(2, "tied", {}),
    Case(2, "Gemma-3", {"tp": 2}),
    Case(2, "Gemma-3", {"tp": 2, "sp": True}),
    Case(2, "Gemma-3", {"pp": 2, "first": 1}),
    Case(2, "Gemma-3", {"cp": 2}),
    Case(2, "Qwen3-MoE", {"ep": 2}),
    Case(2, "Mixtral", {"ep": 2}),
    Case(2, "Mixtral", {"tp": 2, "sp": True, "etp": 2}),
    Case(2, "Qwen3-MoE", {"ep": 2, "tp": 2, "sp": True}),
    Case(2, "Qwen3-MoE", {"tp": 2, "sp": True, "etp": 2}),
    Case(2, "Qwen3-MoE", {"pp": 2}),
    Case(2, "Qwen3-MoE", {"cp": 2}),
    Case(2, "tied", {"tp": 2, "sp": True}, shared=True),
    Case(2, "tied", {"pp": 2}, shared=True),
    Case(2, "tied", {"pp": 2, "vp": 2}, shared=True, recompute=True),
    Case(2, "Qwen3-MoE", {"ep": 2}, shared=True),
    Case(2, "tied", {"tp": 2, "sp": True}, temperature=0.7, recompute=True),
    Case(2, "tied", {"pp": 2}, temperature=0.7),
    Case(2, "tied", {"cp": 2}, temperature=0.7, recompute=True),
    Case(3, "thirds", {"tp": 3, "sp": True}),
    Case(4, "tied", {"tp": 2, "sp": True, "pp": 2}),
    Case(4, "biases", {"tp": 2, "sp": True}),
    Case(4, "tied", {"pp": 2, "cp": 2}),
    Case(4, "QK norms", {"tp": 2, "sp": True, "cp": 2}),
    Case(4, "Qwen3-MoE", {"ep": 2, "tp": 2, "sp": True}),
    Case(4, "Mixtral", {"ep": 2, "tp": 2, "sp": True, "etp": 2}),
    Case(4, "QK norms", {"pp": 4}),
    Case(4, "Gemma-3", {"tp": 2, "sp": True, "cp": 2}),
    Case(4, "one KV head of four", {"tp": 4, "sp": True}),
]


def folder_of(models: Path, name: str) -> Path:
    return models / name.replace(" ", "_").replace(",", "")


def run_cases(rank: int, models: Path, out: Path, ranks: int) -> None:
    for number, case in enumerate(CASES):
        if case.ranks != ranks:
            continue
        folder = folder_of(models, case.model)
        distributed.initialize(make_config(folder, case.changes))
        backend = MegatronBackend(make_config(folder, case.changes), folder)
        saved: dict[str, Any] = {"loaded": weights_of(backend), "log_probs": backend.log_probs(ragged_batch())}
        saved["result"] = vars(backend.step(ragged_batch(), policy_gradient))
        saved["weights"] = weights_of(backend)
        saved["of nothing"] = vars(backend.step(nothing_trained(), policy_gradient))
        saved["weights after nothing"] = weights_of(backend)
        torch.save(saved, out / f"{number}_{rank}.pt")
        parallel_state.destroy_model_parallel()


def nothing_trained() -> Batch:
    batch = ragged_batch()
    return replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, shape in MODELS.items():
        make_model(folder_of(root, name), **shape)
    return root


@pytest.fixture(scope="module")
def outcomes(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("outcomes")
    for ranks in sorted({case.ranks for case in CASES}):
        run_ranks(ranks, run_cases, models, out, ranks)
    return out


@pytest.fixture(scope="module")
def alone(models: Path) -> dict[tuple[str, float], tuple[StepResult, dict[str, Tensor]]]:
    """What one process does that shares and recomputes nothing, by model and temperature."""
    return {
        (name, temperature): one_step(
            folder_of(models, name), ragged_batch(), {**PLAIN_GRADIENT, **PACKED, **sampled_at(temperature)}
        )
        for name, temperature in {(case.model, case.temperature) for case in CASES}
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process(
    case: Case, models: Path, outcomes: Path, alone: dict[tuple[str, float], tuple[StepResult, dict[str, Tensor]]]
) -> None:
    """L-03, L-06, M-03, M-04, M-05, M-07, K-06, K-08, W-09, W-11, W-13; M-01, whose parts are not used"""
    expected, weights = alone[case.model, case.temperature]
    source = load_file(folder_of(models, case.model) / "model.safetensors")
    for rank in range(case.ranks):
        saved = torch.load(outcomes / f"{CASES.index(case)}_{rank}.pt", weights_only=True)
        assert saved["loaded"].keys() == source.keys()
        assert all(torch.equal(saved["loaded"][name], source[name]) for name in source), "not bit-equal to its source"
        result = StepResult(**saved["result"])
        assert relative(saved["log_probs"], expected.log_probs) <= 1e-5
        assert relative(result.log_probs, expected.log_probs) <= 1e-5
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert of_the_batch(result.metrics) == pytest.approx(of_the_batch(expected.metrics), rel=1e-5)
        assert all(relative(saved["weights"][name], weights[name]) <= 1e-5 for name in weights)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_with_nothing_to_train_on_goes_through_every_stage(case: Case, outcomes: Path) -> None:
    """L-02, K-13, M-09: no gradient on any rank, no division by zero, no rank left waiting, nothing moves."""
    for rank in range(case.ranks):
        saved = torch.load(outcomes / f"{CASES.index(case)}_{rank}.pt", weights_only=True)
        assert (saved["of nothing"]["loss"], saved["of nothing"]["grad_norm"]) == (0.0, 0.0)
        before, after = saved["weights"], saved["weights after nothing"]
        assert all(torch.equal(after[name], before[name]) for name in before)
