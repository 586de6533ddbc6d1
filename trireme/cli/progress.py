"""What `trireme up` shows while a run goes on: a live table in a terminal, a line per step elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trireme.contracts.v1 import trainer_pb2
from trireme.launch.supervisor import Event, Stage

SHOWN_STEPS = 12
MARKS = {
    Stage.STARTING: "[dim]…[/]",
    Stage.HEALTHY: "[green]✓[/]",
    Stage.WAITING: "[yellow]↻[/]",
    Stage.ENDED: "[green]■[/]",
    Stage.LOST: "[red]✗[/]",
    Stage.STOPPED: "[dim]■[/]",
}


@dataclass(frozen=True)
class Column:
    """One number of a step: the first of `keys` that a row of metrics.jsonl has."""

    title: str
    keys: tuple[str, ...]
    form: str

    def show(self, row: Mapping[str, Any]) -> str:
        value = next((row[key] for key in self.keys if row.get(key) is not None), None)
        return "" if value is None or not math.isfinite(value) else format(value, self.form)


COLUMNS = (
    Column("step", ("step",), "d"),
    Column("reward", ("train/reward",), ".3f"),
    Column("held-out", ("validation/accuracy",), ".3f"),
    Column("loss", ("train/loss",), "+.4f"),
    Column("grad norm", ("train/grad_norm",), ".3f"),
    Column("gen tok/s", ("train/generation_tokens_per_s",), ".0f"),
    Column("train tok/s", ("train/training_tokens_per_s",), ".0f"),
    Column("mismatch", ("train/token_mult_prob_error",), ".4f"),
    Column("seconds", ("timing/train/total_step_time",), ".1f"),
)


class Steps:
    """The rows of metrics.jsonl by step: a validation may come in a row of its own, and belongs to its step."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        self.rows.setdefault(int(row.get("step", 0)), {}).update(row)

    def last(self, count: int) -> list[dict[str, Any]]:
        return [self.rows[step] for step in sorted(self.rows)[-count:]]


def steps_table(steps: Steps, count: int = SHOWN_STEPS) -> Table:
    """The last `count` steps, newest at the bottom. Columns without any value are left out."""
    rows = steps.last(count)
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = [column for column in COLUMNS if any(column.show(row) for row in rows)]
    for column in columns:
        table.add_column(column.title, justify="right")
    for row in rows:
        table.add_row(*(column.show(row) for column in columns))
    return table


def step_line(row: Mapping[str, Any]) -> str:
    """One step as a line of text, for logs."""
    shown = ((column.title, column.show(row)) for column in COLUMNS)
    return "  ".join(f"{title} {value}" for title, value in shown if value)


def status_line(status: trainer_pb2.TrainerStatus) -> str:
    """Where the trainer stands now."""
    total = f"/{status.max_steps}" if status.max_steps else ""
    return f"{status.phase}  step {status.step}{total}  weights v{status.weight_version}"


@dataclass
class LineView:
    """Lines in order of events: for logs, pipes and --no-progress."""

    console: Console
    steps: Steps = field(default_factory=Steps)
    follows: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def event(self, event: Event) -> None:
        self.console.print(event_line(event), highlight=False)

    def row(self, metrics: dict[str, Any]) -> None:
        self.steps.add(metrics)
        self.console.print(step_line(metrics), highlight=False, markup=False, soft_wrap=True)

    def status(self, status: trainer_pb2.TrainerStatus | None) -> None:
        return None

    def say(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)


class LiveView(LineView):
    """A table that is redrawn in place; events scroll by above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, follows=True)
        self._starting: dict[str, Stage] = {}
        self._status: trainer_pb2.TrainerStatus | None = None
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status = None
        self._live.stop()

    def event(self, event: Event) -> None:
        self._starting[event.name] = event.stage
        if event.stage is not Stage.STARTING:
            super().event(event)

    def row(self, metrics: dict[str, Any]) -> None:
        self.steps.add(metrics)

    def status(self, status: trainer_pb2.TrainerStatus | None) -> None:
        self._status = status or self._status

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [steps_table(self.steps)] if self.steps.rows else []
        waiting = [name for name, stage in self._starting.items() if stage is Stage.STARTING]
        if waiting:
            parts.append(Text(f"starting {', '.join(waiting)} …", style="dim"))
        elif self._status is not None:
            parts.append(Text(status_line(self._status), style="cyan"))
        return Group(*parts)


def event_line(event: Event) -> str:
    """With rich markup."""
    detail = f"  {escape(event.detail)}" if event.detail else ""
    return f"{MARKS[event.stage]} {event.name} {event.stage.value}{detail}"
