"""metrics.jsonl, samples.jsonl and TensorBoard, read back by independent readers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from services.trainer import recorders
from services.trainer.recorders import JsonLines, TensorBoard, sample_row
from tests.unit.config.support import make
from trireme.contracts.v1 import sample_pb2


def test_every_line_is_json_and_on_disk_at_once(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.record(1, {"train/loss": 0.5, "train/reward": math.nan})
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").open()]
    assert rows == [{"step": 1, "train/loss": 0.5, "train/reward": None}]


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        lines = JsonLines(tmp_path / "metrics.jsonl")
        lines.record(step, {})
        lines.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_rewinding_drops_the_rows_of_later_steps_and_a_cut_line(tmp_path: Path) -> None:
    """A run killed after its checkpoint takes those steps again: each step has its row once."""
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in (1, 2, 3):
        lines.record(step, {"train/reward": step})
    lines.close()
    path.write_text(path.read_text() + '{"step": 4, "train/rew')
    resumed = JsonLines(path)
    resumed.rewind(1)
    resumed.record(2, {"train/reward": 7})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "train/reward": 1},
        {"step": 2, "train/reward": 7},
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rewinding_takes_no_character_of_a_text_for_the_end_of_a_line(tmp_path: Path) -> None:
    """Models sample these, and Python's `str.splitlines` splits at each."""
    path = tmp_path / "samples.jsonl"
    text = "a\u2028b\u2029c\x85d\x0be"
    lines = JsonLines(path)
    lines.write({"step": 1, "response": text})
    lines.rewind(1)
    lines.close()
    assert [json.loads(line) for line in path.read_text().split("\n") if line] == [{"step": 1, "response": text}]


def test_tensorboard_reads_the_scalars_back(tmp_path: Path) -> None:
    recorder = TensorBoard(tmp_path, {})
    recorder.record(3, {"train/loss": 0.25})
    recorder.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(3, 0.25)]


def test_a_missing_library_names_its_key() -> None:
    with pytest.raises(ValueError, match=r"logger\.wandb_enabled is true but no_such_library cannot be imported"):
        recorders._require("no_such_library", "logger.wandb_enabled")


def test_a_masked_sample_has_no_reward() -> None:
    """L-08's kin R-28: an unknown reward is null in the record, never 0."""
    sample = sample_pb2.Sample(
        id="g/0",
        prompt_text="p",
        response_text="é",
        finish_reason=sample_pb2.FINISH_REASON_STOP,
        response_token_ids=[1, 2],
        versions=[sample_pb2.VersionSpan(start=0, length=2, version=7)],
    )
    row = json.loads(json.dumps(sample_row(4, sample, None)))
    assert row["reward"] is None
    assert (row["step"], row["response"], row["versions"], row["finish_reason"], row["response_tokens"]) == (
        4, "é", [[0, 2, 7]], "FINISH_REASON_STOP", 2,
    )  # fmt: skip


def test_weights_and_biases_gets_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(recorders, "_require", lambda *_: SimpleNamespace(init=lambda **given: told.update(given)))
    recorders.WeightsAndBiases(make("redis.url=redis://:secret@host"), {"project": "p"})
    assert told["project"] == "p" and "secret" not in str(told["config"])
