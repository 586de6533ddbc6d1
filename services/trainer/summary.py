"""summary.json: what a run came to, in a dozen numbers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

WINDOW = 5  # steps at either end whose mean reward is compared
# The per-step metrics that a summary is made of.
KEPT = (
    "train/reward",
    "train/generated_tokens",
    "train/total_tokens",
    "train/token_mult_prob_error",
    "train/token_mult_prob_error_p99",
    "train/gen_kl_error",
    "timing/train/generation",
    "timing/train/policy_training",
    "timing/train/weight_update",
)


class Summary:
    """Collects what `write` needs, across resumes."""

    def __init__(self) -> None:
        self._steps: list[dict[str, float]] = []
        self._heldout: list[float] = []

    def stepped(self, metrics: Mapping[str, float]) -> None:
        self._steps.append({key: metrics[key] for key in KEPT if key in metrics})

    def validated(self, accuracy: float) -> None:
        self._heldout.append(accuracy)

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps, "heldout": self._heldout}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._steps, self._heldout = list(state["steps"]), list(state["heldout"])

    def write(self, path: Path, *, steps: int, seconds: float) -> None:
        """Write the file in one piece. `seconds` is the wall-clock time of this process's part of the run."""
        partial = path.with_suffix(".json.partial")
        partial.write_text(json.dumps(self.figures(steps, seconds), indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)

    def figures(self, steps: int, seconds: float) -> dict[str, float | int | None]:
        """The numbers; None where nothing was measured."""
        rewards = self._all("train/reward")
        return {
            "steps": steps,
            "seconds": round(seconds, 3),
            "reward_first5": _mean(rewards[:WINDOW]),
            "reward_last5": _mean(rewards[-WINDOW:]),
            "heldout_before": self._heldout[0] if self._heldout else None,
            "heldout_after": self._heldout[-1] if self._heldout else None,
            "generation_tokens_per_s": self._rate("train/generated_tokens", "timing/train/generation"),
            "training_tokens_per_s": self._rate("train/total_tokens", "timing/train/policy_training"),
            "weight_update_s_median": _median(self._all("timing/train/weight_update")),
            "token_mult_prob_error_mean": _mean(self._all("train/token_mult_prob_error")),
            "token_mult_prob_error_p99": _mean(self._all("train/token_mult_prob_error_p99")),
            "gen_kl_error_mean": _mean(self._all("train/gen_kl_error")),
        }

    def _all(self, key: str) -> list[float]:
        return [step[key] for step in self._steps if key in step and math.isfinite(step[key])]

    def _rate(self, amount: str, seconds: str) -> float | None:
        total = sum(self._all(seconds))
        return sum(self._all(amount)) / total if total > 0 else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
