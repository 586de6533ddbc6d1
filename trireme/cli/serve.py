"""`trireme serve`: become one service."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from trireme.cli.console import refuse
from trireme.cli.up import checked_config
from trireme.config import Config
from trireme.config.loader import REDIS_URL_VARIABLE
from trireme.launch.plan import PlanError, require_installed, require_libraries, service_command
from trireme.launch.process import ALWAYS
from trireme.launch.rundir import RunDirectory
from trireme.registry import Kind


def serve(kind: Kind, path: Path, overrides: Sequence[str], *, name: str | None) -> NoReturn:
    """Replaces this process, so that signals and exit codes are the service's own."""
    config = checked_config(path, overrides)
    try:
        require_installed(kind, config)
        require_libraries(kind)
    except PlanError as error:
        refuse(str(error))
    environment = {**os.environ, **ALWAYS, REDIS_URL_VARIABLE: _redis_url(config)}
    ranks = config.trainer.nproc if kind == "trainer" else 1
    command = service_command(kind, path, overrides, name=name or f"{kind}-{os.getpid()}", ranks=ranks)
    os.execvpe(command[0], command, environment)


def _redis_url(config: Config) -> str:
    """The configured one, else that of the run that goes on in run.dir."""
    directory = RunDirectory(config.run.dir)
    state = directory.load_state() if directory.holder() is not None else None
    url = config.redis.url or (state.redis_url if state else None)
    if url is None:
        refuse(
            "redis.url is null and no run is going on in "
            f"{directory.path}: a service on its own needs a Redis; set redis.url=redis://… or {REDIS_URL_VARIABLE}"
        )
    return url
