"""A checkpoint of any layout loads into any other: weights, moments, schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from services.trainer.backends.base import StepResult
from services.trainer.backends.megatron import distributed
from services.trainer.backends.megatron.backend import MegatronBackend
from tests.integration.megatron.support import (
    make_config,
    make_model,
    policy_gradient,
    ragged_batch,
    run_ranks,
    weights_of,
)
from tests.integration.megatron.test_layouts import MODELS, Case

CHANGES = {
    "policy.megatron_cfg.scheduler.lr_warmup_iters": 5,
    "policy.megatron_cfg.scheduler.lr_warmup_init": 1e-5,
    "policy.megatron_cfg.optimizer.weight_decay": 0.1,
}
# Each takes up what the one before it left; the first, what one process did.
CHAINS = {
    "tied": [{"tp": 2, "sp": True}, {"pp": 2, "first": 1}, {}, {"cp": 2}, {"pp": 2, "vp": 2}, {"tp": 2}],
    "Qwen3-MoE": [{"ep": 2}, {"pp": 2}, {"tp": 2, "sp": True, "ep": 2}, {}],
}


def changes_of(layout: dict[str, Any]) -> dict[str, Any]:
    return {**Case(2, "", layout).layout_changes, **CHANGES}


def run_chain(rank: int, folder: Path, out: Path, chain: list[dict[str, Any]]) -> None:
    for number, layout in enumerate(chain):
        config = make_config(folder, changes_of(layout))
        distributed.initialize(config)
        backend = MegatronBackend(config, folder)
        backend.restore(out / f"checkpoint_{number}")
        result = backend.step(ragged_batch(number + 1), policy_gradient)
        if rank == 0:
            (out / f"checkpoint_{number + 1}").mkdir()
        torch.distributed.barrier()
        backend.save(out / f"checkpoint_{number + 1}").result()
        torch.save({"result": vars(result), "weights": weights_of(backend)}, out / f"{number}_{rank}.pt")
        parallel_state.destroy_model_parallel()


def follow(backend: MegatronBackend, steps: range) -> list[tuple[StepResult, dict[str, Tensor]]]:
    return [(backend.step(ragged_batch(seed), policy_gradient), weights_of(backend)) for seed in steps]


@pytest.mark.parametrize("name", CHAINS)
def test_every_layout_takes_up_what_another_left(name: str, tmp_path: Path) -> None:
    """C-04, C-06: the moments are there too, or the next step would differ; W-19: nothing is remembered of a layout."""
    folder = make_model(tmp_path / "model", **MODELS[name])
    alone = MegatronBackend(make_config(folder, CHANGES), folder)
    alone.step(ragged_batch(0), policy_gradient)
    (tmp_path / "checkpoint_0").mkdir()
    alone.save(tmp_path / "checkpoint_0").result()
    chain = CHAINS[name]
    expected = follow(alone, range(1, len(chain) + 2))
    run_ranks(2, run_chain, folder, tmp_path, chain)
    for number in range(len(chain)):
        saved = torch.load(tmp_path / f"{number}_0.pt", weights_only=True)
        assert_same(StepResult(**saved["result"]), saved["weights"], *expected[number])
    back = MegatronBackend(make_config(folder, CHANGES), folder)
    back.restore(tmp_path / f"checkpoint_{len(chain)}")
    ((result, weights),) = follow(back, range(len(chain) + 1, len(chain) + 2))
    assert_same(result, weights, *expected[-1])


def assert_same(
    result: StepResult, weights: dict[str, Tensor], expected: StepResult, expected_weights: dict[str, Tensor]
) -> None:
    assert result.learning_rate == expected.learning_rate
    assert result.loss == pytest.approx(expected.loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    # Adam's update is the rate times a ratio of moments: compare it on the scale of the rate, 1e-3.
    errors = {name: float((tensor - expected_weights[name]).abs().mean()) for name, tensor in weights.items()}
    assert max(errors.values()) <= 1e-7, errors
