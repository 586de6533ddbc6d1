"""How far the trainer's log-probs are from those recorded by the engine: what to look at first when learning fails.

Computed over a whole batch at once in float64, because quantiles do not add up over micro-batches. Healthy values:
`token_mult_prob_error` below 1.05, `gen_kl_error` below 1e-3.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.batch import Batch
from services.trainer.corrections import Correction, importance_weights
from services.trainer.objectives.base import Terms

Floats = NDArray[np.float64]
QUANTILES = {"p50": 0.5, "p99": 0.99}
LOG_RATIO_LIMIT = 20.0  # exp of it is alarming enough, and still a number


def mismatch(log_probs: Tensor, batch: Batch, correction: Correction | None = None) -> dict[str, float]:
    """Metrics over all trained tokens of the batch, and with the suffix `/age_K` over those of age K.

    log_probs: [T], the trainer's under the weights before its update. correction: what the objective applies, for the
    share of tokens that it drops. Empty when no token is trained.
    """
    trainer, engine, age = _trained(log_probs, batch)
    if not len(trainer):
        return {}
    dropped = _dropped(log_probs, batch, correction)
    result = _measures(trainer, engine, dropped)
    result["sample_age_mean"], result["sample_age_max"] = float(age.mean()), float(age.max())
    for one in np.unique(age):
        of_age = age == one
        parts = _measures(trainer[of_age], engine[of_age], dropped[of_age])
        result |= {f"{name}/age_{one}": value for name, value in parts.items()}
    return result


def _trained(log_probs: Tensor, batch: Batch) -> tuple[Floats, Floats, NDArray[np.int64]]:
    mask = batch.loss_mask.cpu()
    age = batch.age.cpu()[batch.sequence_index.cpu()]
    trainer = log_probs.detach().to("cpu", torch.float64)[mask].numpy()
    engine = batch.generation_log_probs.to("cpu", torch.float64)[mask].numpy()
    return trainer, engine, age[mask].numpy()


def _dropped(log_probs: Tensor, batch: Batch, correction: Correction | None) -> NDArray[np.bool_]:
    mask = batch.loss_mask.cpu()
    if correction is None:
        return np.zeros(int(mask.sum()), bool)
    terms = Terms.of(log_probs.detach(), batch.with_log_probs(old=log_probs.detach()))
    return importance_weights(terms, correction).dropped.cpu()[mask].numpy()


def _measures(trainer: Floats, engine: Floats, dropped: NDArray[np.bool_]) -> dict[str, float]:
    """[n] each, n > 0. Tokens where one side is not finite are counted, and left out of the rest."""
    finite = np.isfinite(trainer) & np.isfinite(engine)
    result = {
        "masked_fraction": float(dropped.mean()),
        "nonfinite_fraction": float(1 - finite.mean()),
    }
    if finite.any():
        gap = np.clip(trainer[finite] - engine[finite], -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        result |= _of_gap(gap)
    return result


def _of_gap(gap: Floats) -> dict[str, float]:
    """gap: log p_trainer - log p_engine of tokens drawn from the engine."""
    error = np.exp(np.abs(gap))
    weights = np.exp(gap)
    return {
        "token_mult_prob_error": float(error.mean()),
        **{f"token_mult_prob_error_{name}": float(np.quantile(error, q)) for name, q in QUANTILES.items()},
        "token_mult_prob_error_max": float(error.max()),
        "gen_kl_error": float(_k3(gap).mean()),  # KL(engine || trainer)
        "policy_kl_error": float(_k3(-gap).mean()),  # the same formula with the sides exchanged
        "effective_sample_size": float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
    }


def _k3(log_ratio: Floats) -> Floats:
    return np.expm1(log_ratio) - log_ratio
