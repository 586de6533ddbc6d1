"""What is shown of a run: steps, events, the summary."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

from rich.console import Console, RenderableType

from trireme.cli.progress import LineView, LiveView, Steps, step_line, steps_table
from trireme.cli.summary import load_summary, summary_table
from trireme.contracts.v1 import trainer_pb2
from trireme.launch.run import MetricsTail
from trireme.launch.rundir import RunDirectory
from trireme.launch.supervisor import Event, Stage

ROW = {
    "step": 7,
    "train/reward": 0.25,
    "train/loss": -0.5,
    "train/grad_norm": 1.5,
    "train/token_mult_prob_error": 1.0625,
    "train/generation_tokens_per_s": 120.4,
    "train/training_tokens_per_s": 250.6,
    "timing/train/total_step_time": 3.21,
}


def text(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_step_is_one_line_with_its_numbers() -> None:
    assert step_line(ROW) == (
        "step 7  reward 0.250  loss -0.5000  grad norm 1.500  gen tok/s 120  train tok/s 251  mismatch 1.0625"
        "  seconds 3.2"
    )


def test_numbers_that_are_missing_or_not_finite_are_left_out() -> None:
    """A reward of 0 is shown: it is not a missing one (R-25)."""
    assert step_line({"step": 1, "train/reward": 0.0, "train/loss": None}) == "step 1  reward 0.000"


def test_a_validation_row_joins_its_step() -> None:
    steps = Steps()
    steps.add(ROW)
    steps.add({"step": 7, "validation/accuracy": 0.4})
    shown = text(steps_table(steps))
    assert len(shown.splitlines()) == 2
    assert "0.400" in shown and "0.250" in shown


def test_the_table_shows_the_last_steps_in_order() -> None:
    steps = Steps()
    for step in range(30):
        steps.add({"step": step, "train/reward": step / 100})
    lines = text(steps_table(steps, count=3)).splitlines()
    assert [line.split()[0] for line in lines] == ["step", "27", "28", "29"]


def test_details_are_not_taken_for_markup() -> None:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    LineView(console).event(Event("rollout-0", Stage.LOST, "pip install 'trireme-rl[rollout]' [/red]"))
    assert "'trireme-rl[rollout]' [/red]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_live_view_says_what_it_waits_for_and_where_the_trainer_is() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with LiveView(console) as view:
        view.event(Event("rollout-0", Stage.STARTING))
        assert "starting rollout-0" in text(view._render())
        view.event(Event("rollout-0", Stage.HEALTHY))
        view.status(trainer_pb2.TrainerStatus(step=3, max_steps=10, phase="training", weight_version=4))
        view.row(ROW)
        shown = text(view._render())
    assert "training  step 3/10  weights v4" in shown and "0.250" in shown


def test_the_tail_gives_complete_new_lines_only(tmp_path: Path) -> None:
    """A resumed run appends to its file: what an earlier part wrote is not shown again."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    tail = MetricsTail(path)
    with path.open("a") as file:
        file.write('{"step": 2}\n{"st')
        file.flush()
        assert [row["step"] for row in tail.rows()] == [2]
        file.write('ep": 3}\n')
        file.flush()
    assert [row["step"] for row in tail.rows()] == [3]
    assert list(tail.rows()) == []


def test_the_tail_of_a_file_that_was_rewound_and_has_grown_again(tmp_path: Path) -> None:
    """Its offset then lies within a line of another length."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    tail = MetricsTail(path)
    path.write_text('{"step": 1}\n{"step": 2, "train/reward": 0.25}\n{"step": 3}\nnot json\n')
    assert [row["step"] for row in tail.rows()] == [3]


def test_the_summary_shows_what_there_is(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert load_summary(directory) is None
    figures = {"steps": 20, "seconds": 61.2, "reward_first5": 0.1, "reward_last5": 0.75, "heldout_before": None}
    directory.summary.write_text(json.dumps(figures))
    shown = text(summary_table(load_summary(directory) or {}))
    assert "0.100 → 0.750" in shown and "61" in shown
    assert "held-out" not in shown


def test_the_summary_of_an_earlier_run_is_not_shown(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.summary.write_text('{"steps": 1}')
    os.utime(directory.summary, (1000, 1000))
    assert load_summary(directory, newer_than_unix_s=2000.0) is None
