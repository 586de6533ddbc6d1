"""What `trireme up` says at the end of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from trireme.launch.rundir import RunDirectory

# Label, keys of summary.json shown beside each other, how.
LINES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("steps", ("steps",), "{:d}"),
    ("seconds", ("seconds",), "{:.0f}"),
    ("training reward, first and last five steps", ("reward_first5", "reward_last5"), "{:.3f} → {:.3f}"),
    ("held-out accuracy, before and after", ("heldout_before", "heldout_after"), "{:.3f} → {:.3f}"),
    ("generation, tokens/s", ("generation_tokens_per_s",), "{:.0f}"),
    ("training, tokens/s", ("training_tokens_per_s",), "{:.0f}"),
    ("weight update, median seconds", ("weight_update_s_median",), "{:.2f}"),
    (
        "mismatch (token_mult_prob_error), mean and 99th percentile",
        ("token_mult_prob_error_mean", "token_mult_prob_error_p99"),
        "{:.4f}, {:.4f}",
    ),
    ("mismatch (gen_kl_error), mean", ("gen_kl_error_mean",), "{:.2e}"),
)


def load_summary(directory: RunDirectory, newer_than_unix_s: float = 0.0) -> dict[str, Any] | None:
    """summary.json; None when the trainer wrote none since then."""
    try:
        if directory.summary.stat().st_mtime < newer_than_unix_s:
            return None
        return dict(json.loads(directory.summary.read_text()))
    except (FileNotFoundError, ValueError):
        return None


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The figures that there are: a run without validation has no held-out accuracy."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right", style="bold")
    for label, keys, form in LINES:
        values = [summary.get(key) for key in keys]
        if all(value is not None for value in values):
            table.add_row(label, form.format(*values))
    return table
