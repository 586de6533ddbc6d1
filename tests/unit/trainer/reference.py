"""The losses of the papers once more, token by token in Python floats, to compare the tensor code with.

Stop-gradients are explicit: a function takes the current log-probs twice, `lp` to differentiate (by finite
differences) and `held` for whatever must not be differentiated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.trainer.batch import Batch
from trireme.config.blocks.loss_fn import LossConfig


@dataclass(frozen=True)
class Token:
    """Values at one trained token. position: in the batch."""

    position: int
    old: float | None
    generation: float
    reference: float
    advantage: float


def trained_tokens(batch: Batch) -> list[list[Token]]:
    """The trained tokens of each sequence."""
    result, position = [], 0
    for length in batch.lengths.tolist():
        tokens = [_token(batch, t) for t in range(position, position + length) if batch.loss_mask[t]]
        result.append(tokens)
        position += length
    return result


def _token(batch: Batch, t: int) -> Token:
    assert batch.reference_log_probs is not None
    old = None if batch.old_log_probs is None else float(batch.old_log_probs[t])
    return Token(
        t, old, float(batch.generation_log_probs[t]), float(batch.reference_log_probs[t]), float(batch.advantages[t])
    )


def loss(lp: list[float], held: list[float], batch: Batch, config: LossConfig) -> float:
    """The loss of the whole batch."""
    sequences = [tokens for tokens in trained_tokens(batch) if tokens]
    losses = [_sequence(tokens, lp, held, config) for tokens in sequences]
    if not losses:
        return 0.0
    if config.token_level_loss:
        return sum(map(sum, losses)) / sum(map(len, losses))
    return sum(sum(one) / len(one) for one in losses) / len(losses)


def _sequence(tokens: list[Token], lp: list[float], held: list[float], config: LossConfig) -> list[float]:
    old = {t.position: held[t.position] if t.old is None or config.force_on_policy_ratio else t.old for t in tokens}
    log_ratios = [lp[t.position] - old[t.position] for t in tokens]
    corrections = [old[t.position] - t.generation for t in tokens]
    mean_ratio, mean_correction = sum(log_ratios) / len(tokens), sum(corrections) / len(tokens)
    result = []
    for t, log_ratio, correction in zip(tokens, log_ratios, corrections, strict=True):
        by_sequence = config.sequence_level_importance_ratios
        ratio = math.exp(mean_ratio if by_sequence else log_ratio)
        value = _policy(t, ratio, lp[t.position], config)
        if config.use_importance_sampling_correction:
            value *= _weight(math.exp(mean_correction if by_sequence else correction), mean_correction, config)
        result.append(value + _penalty(t, lp[t.position], held[t.position], config))
    return result


def _policy(t: Token, ratio: float, lp: float, config: LossConfig) -> float:
    low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
    if config.use_cispo:
        raise AssertionError("CISPO holds its ratio: see cispo_gradient")
    if config.disable_ppo_ratio:
        return -t.advantage * lp
    value = max(-t.advantage * ratio, -t.advantage * min(max(ratio, low), high))
    if config.ratio_clip_c is not None and t.advantage < 0:
        value = min(value, -t.advantage * config.ratio_clip_c)
    return value


def _weight(raw: float, mean: float, config: LossConfig) -> float:
    kind, high, low = (
        config.truncated_importance_sampling_type,
        config.truncated_importance_sampling_ratio,
        config.truncated_importance_sampling_ratio_min or 0.0,
    )
    if kind is None:
        return raw
    assert high is not None
    if kind == "tis":
        return min(max(raw, low), high)
    judged = raw if kind == "icepop" else math.exp(mean)
    return raw if low <= judged <= high else 0.0


def _penalty(t: Token, lp: float, held: float, config: LossConfig) -> float:
    if config.reference_policy_kl_penalty == 0:
        return 0.0
    d = t.reference - lp
    value = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[config.reference_policy_kl_type]
    value *= math.exp(lp - held)
    if config.use_on_policy_kl_approximation:
        value *= math.exp(held - t.generation)
    return config.reference_policy_kl_penalty * value


def gradient(batch: Batch, lp: list[float], config: LossConfig, step: float = 1e-6) -> list[float]:
    """d loss / d lp by central differences, with everything that is held kept where it is."""
    result = []
    for t in range(len(lp)):
        up, down = lp.copy(), lp.copy()
        up[t] += step
        down[t] -= step
        result.append((loss(up, lp, batch, config) - loss(down, lp, batch, config)) / (2 * step))
    return result
