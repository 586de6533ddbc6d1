"""Estimators of the KL to the reference, against an exact KL between two distributions."""

from __future__ import annotations

import math

import pytest
import torch

from services.trainer.objectives.kl import KlType, kl_estimate, kl_penalty


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy and log-probs of a reference over 6 tokens, float64."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=rng, dtype=torch.float64)
    reference = torch.log_softmax(logits + 0.4 * torch.randn(6, generator=rng, dtype=torch.float64), -1)
    return logits.requires_grad_(), reference


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_its_expectation_is_the_kl(kind: KlType) -> None:
    logits, reference = distributions()
    lp = torch.log_softmax(logits, -1)
    lp = lp.detach()
    exact = torch.nn.functional.kl_div(reference, lp, reduction="sum", log_target=True)
    assert float((lp.exp() * kl_estimate(lp, reference, kind)).sum()) == pytest.approx(float(exact))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_its_expected_gradient_is_that_of_the_kl(kind: KlType) -> None:
    """The factor exp(lp - sg lp) stands for the sampling: with it, a mean over drawn tokens has the KL's gradient."""
    logits, reference = distributions()
    lp = torch.log_softmax(logits, -1)
    exact = (lp.exp() * (lp - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    drawn = (lp.exp().detach() * kl_penalty(lp, reference, kind)).sum()
    (got,) = torch.autograd.grad(drawn, logits)
    assert torch.allclose(got, wanted, atol=1e-12)


def test_k1_without_the_factor_would_pull_nowhere() -> None:
    logits, reference = distributions()
    lp = torch.log_softmax(logits, -1)
    (got,) = torch.autograd.grad((lp.exp().detach() * kl_estimate(lp, reference, "k1")).sum(), logits)
    assert float(got.abs().max()) < 1e-12


@pytest.mark.parametrize(("kind", "expected"), [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1.5)])
def test_values(kind: KlType, expected: float) -> None:
    """d = reference - lp = 0.5."""
    assert float(kl_estimate(torch.tensor(-1.0), torch.tensor(-0.5), kind)) == pytest.approx(expected)


@pytest.mark.parametrize(("kind", "expected"), [("k1", -10), ("k2", 10), ("k3", 10)])
def test_extreme_tokens_are_bounded(kind: KlType, expected: float) -> None:
    assert float(kl_estimate(torch.tensor(-500.0), torch.tensor(-1.0), kind)) == expected


def test_small_differences_keep_their_precision() -> None:
    """exp(d) - 1 - d loses all digits in float32 near 0; the true value is d^2/2."""
    got = kl_estimate(torch.tensor(-1.0), torch.tensor(-1.0 + 2**-12), "k3")
    assert float(got) == pytest.approx(2.0**-25, rel=1e-2)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="reference_policy_kl_type"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k9")  # type: ignore[arg-type]
