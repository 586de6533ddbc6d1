"""What Transformer Engine's Adam expects of its callers. It needs CUDA: a fake with its interface stands for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from services.trainer.backends.megatron import cpu
from services.trainer.backends.megatron.checkpoint import _ensure_moments
from services.trainer.backends.megatron.optimizer import clip


class FakeFusedAdam(torch.optim.Optimizer):
    """Keeps float32 masters of bfloat16 weights by itself, and reads gradients from `decoupled_grad`."""

    master_weights = True

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def initialize_state(self, parameter: nn.Parameter, store_param_remainders: bool) -> None:
        assert not store_param_remainders
        state = self.state[parameter]
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros(parameter.shape, dtype=torch.float32) for _ in range(2))
        state["master_param"] = parameter.detach().float()


def bfloat16_parameter() -> tuple[nn.Parameter, Tensor]:
    parameter = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.bfloat16))
    gradient = torch.tensor([3.0, 4.0])
    parameter.decoupled_grad = gradient  # type: ignore[attr-defined]
    return parameter, gradient


@pytest.mark.parametrize(("limit", "expected"), [(1.0, [0.6, 0.8]), (10.0, [3.0, 4.0]), (0.0, [3.0, 4.0])])
def test_the_gradient_that_it_reads_is_clipped(limit: float, expected: list[float]) -> None:
    """M-06's kin: with masters in the optimizer, `grad` is not what updates them."""
    parameter, gradient = bfloat16_parameter()
    config = SimpleNamespace(clip_grad=limit, use_precision_aware_optimizer_no_fp8_or_ds_fp8=True)
    part = SimpleNamespace(config=config, get_parameters=lambda: [parameter], optimizer=FakeFusedAdam([parameter]))
    with cpu.device_literals():
        clip(part, norm=5.0)
    assert gradient.tolist() == pytest.approx(expected)


def test_a_checkpoint_before_its_first_step_has_masters_and_moments_in_float32() -> None:
    parameter, _ = bfloat16_parameter()
    optimizer = FakeFusedAdam([parameter])
    _ensure_moments(optimizer)
    state = optimizer.state[parameter]
    assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq", "master_param")} == {torch.float32}
    assert state["master_param"].tolist() == [3.0, 4.0]
