"""Finding the run that a command is about."""

from __future__ import annotations

from pathlib import Path

from trireme.cli.console import refuse
from trireme.launch.rundir import RunDirectory

RUNS = Path("runs")


def find_run(run_dir: Path | None) -> RunDirectory:
    """The given run directory, else the newest below runs/. Ends the command with a message when there is none."""
    if run_dir is None:
        return RunDirectory(_newest())
    directory = RunDirectory(run_dir)
    if not directory.path.is_dir():
        refuse(f"there is no run directory {directory.path}")
    return directory


def _newest() -> Path:
    states = sorted(RUNS.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    if not states:
        refuse(f"no run found below {RUNS.absolute()}: name its directory")
    return states[-1].parent
