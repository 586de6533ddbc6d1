"""`trireme up`: a whole run on this machine, from one file."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.markup import escape

from trireme.cli.console import complain, err, out, refuse
from trireme.cli.progress import LineView, LiveView
from trireme.cli.summary import load_summary, summary_table
from trireme.config import Config, ConfigError
from trireme.config.loader import load
from trireme.config.model_rules import check_model_folder
from trireme.launch.data import check_data
from trireme.launch.interrupts import Interrupts
from trireme.launch.logs import last_lines
from trireme.launch.plan import PlanError, describe, make_plan, require_free_ports, require_installed, require_libraries
from trireme.launch.process import ProcessSpec
from trireme.launch.redis import run_redis
from trireme.launch.resources import available_cores, available_gpus
from trireme.launch.run import FAILED, Run, RunFailed
from trireme.launch.rundir import RunDirectory, RunInUse, RunState, write_private
from trireme.registry import Kind
from trireme.streams.errors import StreamsError

KINDS: tuple[Kind, ...] = ("reward", "rollout", "trainer")
DETACH_POLL_S = 0.2


def checked_config(path: Path, overrides: Sequence[str]) -> Config:
    """The configuration, or the end of the command with a message. Warns of keys that mean nothing here."""
    try:
        loaded = load(path, overrides)
    except ConfigError as error:
        refuse(str(error))
    for notice in loaded.notices:
        err.print(f"[yellow]warning:[/] {escape(notice)}", highlight=False, soft_wrap=True)
    return loaded.config


def up(path: Path, overrides: Sequence[str], *, dry_run: bool, detach: bool, progress: bool) -> int:
    """The exit code: that of the trainer, 2 when something was refused before the start, 1 otherwise."""
    config = checked_config(path, overrides)
    directory = RunDirectory(config.run.dir)
    try:
        _check_machine(config)
        check_data(path, overrides, config)
        if dry_run:
            return _dry_run(config, directory)
        if detach:
            return _detach(path, overrides, directory)
        with directory:
            return _run(config, directory, progress)
    except (ConfigError, PlanError, RunInUse, StreamsError, OSError) as error:
        refuse(str(error))


def _check_machine(config: Config) -> None:
    """Raises ConfigError or PlanError for what would be noticed a minute after the start."""
    check_model_folder(config)
    for kind in KINDS:
        require_installed(kind, config)
        require_libraries(kind)


def _plan(config: Config, directory: RunDirectory, redis_url: str) -> list[ProcessSpec]:
    return make_plan(config, directory, redis_url, available_cores(), available_gpus())


def _dry_run(config: Config, directory: RunDirectory) -> int:
    """What each service would get, without a password."""
    out.print(f"run {config.run.name} in {directory.path}", highlight=False, soft_wrap=True)
    redis = "as redis.url says" if config.redis.url else "embedded, on a free loopback port"
    out.print(f"redis\n  {redis}", highlight=False)
    for spec in _plan(config, directory, config.redis.url or ""):
        out.print(describe(spec), highlight=False, markup=False, soft_wrap=True)
    out.rule("resolved configuration", style="dim")
    out.print(config.to_yaml(mask=True), highlight=False, markup=False, soft_wrap=True)
    return 0


def _run(config: Config, directory: RunDirectory, progress: bool) -> int:
    require_free_ports(config)
    write_private(directory.config, config.to_yaml())
    started = time.time()
    live = progress and out.is_terminal
    with Interrupts() as interrupts, run_redis(config, directory) as redis_url:
        state = RunState(config.run.name, state="starting", redis_url=redis_url)
        with LiveView(out) if live else LineView(out) as view:
            run = Run(_plan(config, directory, redis_url), directory, view, interrupts, state)
            code = _execute(run)
    _finish(directory, code, started)
    return code


def _execute(run: Run) -> int:
    try:
        return run.execute()
    except RunFailed as error:
        complain(str(error))
        return error.code
    except OSError as error:  # the run had begun: this is no refusal
        complain(str(error))
        return FAILED


def _finish(directory: RunDirectory, code: int, started_unix_s: float) -> None:
    summary = load_summary(directory, newer_than_unix_s=started_unix_s)
    if summary is not None:
        out.rule("summary", style="dim")
        out.print(summary_table(summary))
    if summary is not None and directory.hf.exists():
        out.print(f"model (Hugging Face folder): {directory.hf}", highlight=False, soft_wrap=True)
    if code != 0:
        out.print(f"exit code {code}; logs are in {directory.logs}", highlight=False, soft_wrap=True)


def _detach(path: Path, overrides: Sequence[str], directory: RunDirectory) -> int:
    """Start the same command in a session of its own and wait until the run is healthy or has failed."""
    if directory.holder() is not None:
        with directory:  # says by whom it is used
            pass
    directory.logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "trireme", "up", str(path), *overrides, "--no-progress"]
    log = directory.log("up")
    start = log.stat().st_size if log.exists() else 0
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_healthy(process, directory)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise typer.Exit(130) from None
    if process.returncode is not None:
        err.print("\n".join(last_lines(log, 40, start)), highlight=False, markup=False, soft_wrap=True)
        return process.returncode
    _say_how_to_watch(directory, process.pid)
    return 0


def _wait_healthy(process: subprocess.Popen[bytes], directory: RunDirectory) -> None:
    """Returns when the run is healthy, or its process ended."""
    while process.poll() is None:
        state = directory.load_state()
        if state is not None and state.pid == process.pid and state.state == "running":
            return
        time.sleep(DETACH_POLL_S)


def _say_how_to_watch(directory: RunDirectory, pid: int) -> None:
    where = directory.path
    out.print(f"[green]✓[/] running as process {pid} in {where}", highlight=False, soft_wrap=True)
    for what, how in (
        ("state", f"trireme status {where}"),
        ("steps", f"tail -f {directory.log('up')}"),
        ("stop", f"trireme down {where}"),
    ):
        out.print(f"  {what:<6} {how}", highlight=False, soft_wrap=True)
