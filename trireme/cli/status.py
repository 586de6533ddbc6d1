"""`trireme status`: what a run is doing now, for people and (--json) for programs."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from trireme.cli.console import err, out, refuse
from trireme.cli.runs import find_run
from trireme.cli.up import checked_config
from trireme.config.secrets import mask_url
from trireme.launch.rundir import RunDirectory, RunState
from trireme.launch.snapshot import Queue, Snapshot, look
from trireme.registry import ServiceRecord
from trireme.streams.errors import StreamsError

UNREACHABLE = 1


def status(run_dir: Path | None, config: Path | None, *, as_json: bool) -> int:
    """0 when the run is over or answers; UNREACHABLE when it should answer and its Redis does not."""
    directory, state, where = _locate(run_dir, config)
    snapshot, trouble = None, None
    if where is not None:
        try:
            snapshot = asyncio.run(look(*where))
        except StreamsError as error:
            trouble = str(error)
    if as_json:
        out.print_json(json.dumps(_report(directory, state, snapshot, trouble)))
    else:
        _show(directory, state, snapshot)
        if trouble:
            err.print(trouble, highlight=False, markup=False, soft_wrap=True)
    return UNREACHABLE if trouble else 0


def _locate(run_dir: Path | None, config: Path | None) -> tuple[RunDirectory, RunState | None, tuple[str, str] | None]:
    """The run's directory, its state, and (Redis URL, run name) when there should be a Redis to ask."""
    if config is not None:
        loaded = checked_config(config, ())
        directory = RunDirectory(run_dir or loaded.run.dir)
        if loaded.redis.url:
            return directory, _state(directory), (loaded.redis.url, loaded.run.name)
        if not directory.path.is_dir():
            refuse(f"the run of {config} has not been started: there is no {directory.path}")
    else:
        directory = find_run(run_dir)
    state = _state(directory)
    alive = state is not None and directory.holder() is not None
    return directory, state, (state.redis_url, state.run) if state and alive else None


def _state(directory: RunDirectory) -> RunState | None:
    """As recorded, except that a run whose process is gone is not going on, whatever it wrote last."""
    state = directory.load_state()
    if state is None or state.exit_code is not None or directory.holder() is not None:
        return state
    return RunState(**{**vars(state), "state": "died"})


def _report(
    directory: RunDirectory, state: RunState | None, snapshot: Snapshot | None, trouble: str | None
) -> dict[str, Any]:
    shown = {**vars(state), "redis_url": mask_url(state.redis_url)} if state else {"state": "unknown"}
    found = snapshot.as_dict() if snapshot else {}
    return {**shown, "run_dir": str(directory.path), "trouble": trouble, **found}


def _show(directory: RunDirectory, state: RunState | None, snapshot: Snapshot | None) -> None:
    word = state.state if state else "not started by `trireme up` here"
    code = f", exit code {state.exit_code}" if state and state.exit_code is not None else ""
    out.print(f"[bold]{directory.path.name}[/] {word}{code}  [dim]{directory.path}[/]", highlight=False, soft_wrap=True)
    if snapshot is None:
        return
    if snapshot.trainer:
        t = snapshot.trainer
        out.print(f"step {t.step}/{t.max_steps}, {t.phase}, weights v{t.weight_version}", highlight=False)
    out.print(_services(snapshot.services))
    out.print(_queues(snapshot.queues))
    reasons = f": {'; '.join(snapshot.dead_reasons)}" if snapshot.dead_reasons else ""
    out.print(f"dead letters {snapshot.dead_letters}{reasons}", highlight=False, markup=False, soft_wrap=True)


def _services(records: list[ServiceRecord]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("service", "state", "weights", "address", "metrics", "pid", "up"):
        table.add_column(title, justify="right" if title in ("pid", "up") else "left")
    for record in records:
        weights = f"v{record.weight_version}" if record.kind != "reward" else ""
        up = duration(time.time() - record.started_unix_s)
        table.add_row(record.name, record.state, weights, record.address, record.metrics_address, str(record.pid), up)
    return table


def _queues(queues: list[Queue]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("queue", "depth", "in work", "oldest"):
        table.add_column(title, justify="left" if title == "queue" else "right")
    for queue in queues:
        oldest = "" if queue.oldest_age_s is None else duration(queue.oldest_age_s)
        table.add_row(queue.name, str(queue.depth), str(queue.leased), oldest)
    return table


def duration(seconds: float) -> str:
    """Seconds as people say them: 12 s, 3 min, 5 h."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
