"""summary.json from per-step metrics."""

from __future__ import annotations

import json
from pathlib import Path

from services.trainer.summary import Summary


def step(reward: float, update_s: float = 1.0) -> dict[str, float]:
    return {
        "train/reward": reward,
        "train/generated_tokens": 100.0,
        "train/total_tokens": 300.0,
        "timing/train/generation": 2.0,
        "timing/train/policy_training": 3.0,
        "timing/train/weight_update": update_s,
        "train/token_mult_prob_error": 1.25,
        "train/not_kept": 1.0,
    }


def test_first_and_last_five_steps() -> None:
    summary = Summary()
    for reward in range(12):
        summary.stepped(step(float(reward)))
    figures = summary.figures(12, 60.0)
    assert (figures["reward_first5"], figures["reward_last5"]) == (2.0, 9.0)
    assert (figures["generation_tokens_per_s"], figures["training_tokens_per_s"]) == (50.0, 100.0)
    assert figures["token_mult_prob_error_mean"] == 1.25


def test_median_ignores_one_slow_update() -> None:
    summary = Summary()
    for seconds in (1.0, 2.0, 90.0):
        summary.stepped(step(0.0, seconds))
    assert summary.figures(3, 1.0)["weight_update_s_median"] == 2.0


def test_nothing_measured_is_null_not_zero(tmp_path: Path) -> None:
    Summary().write(tmp_path / "summary.json", steps=0, seconds=0.0)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["reward_first5"] is None and written["heldout_before"] is None


def test_goes_on_after_a_restore() -> None:
    before = Summary()
    before.validated(0.25)
    before.stepped(step(1.0))
    after = Summary()
    after.restore(json.loads(json.dumps(before.state())))
    after.stepped(step(3.0))
    after.validated(0.75)
    figures = after.figures(2, 1.0)
    assert (figures["reward_first5"], figures["heldout_before"], figures["heldout_after"]) == (2.0, 0.25, 0.75)
