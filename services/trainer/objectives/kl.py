"""The penalty for leaving the frozen reference: estimators of KL(policy || reference) from the sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KlType = Literal["k1", "k2", "k3"]
LOG_RATIO_LIMIT = 20.0  # exp of more than this carries no information
VALUE_LIMIT = 10.0  # of one token, so that no single one dominates a batch


def kl_estimate(log_probs: Tensor, reference: Tensor, kind: KlType) -> Tensor:
    """[T]: with d = reference - log_probs (within +-20): k1 -d, k2 d^2/2, k3 exp(d) - 1 - d; within +-10.

    Schulman, "Approximating KL divergence": k1 is unbiased, k2 biased with little variance, k3 unbiased and positive.
    """
    d = (reference - log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k1":
        value = -d
    elif kind == "k2":
        value = d.square() / 2
    elif kind == "k3":
        value = torch.expm1(d) - d
    else:
        raise ValueError(f"loss_fn.reference_policy_kl_type must be k1, k2 or k3, got {kind!r}")
    return value.clamp(-VALUE_LIMIT, VALUE_LIMIT)


def kl_penalty(log_probs: Tensor, reference: Tensor, kind: KlType) -> Tensor:
    """[T]: the estimate times exp(lp - sg(lp)), a factor of 1 whose gradient is that of the sampling distribution.

    Without it the gradient ignores that moving the policy changes which tokens are drawn (k1 would pull nowhere).
    """
    return kl_estimate(log_probs, reference, kind) * torch.exp(log_probs - log_probs.detach())
