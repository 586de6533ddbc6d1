"""Reading a run's data before anything is started, in a process of the trainer's own, which alone knows how."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from trireme.config import ConfigError
from trireme.launch.plan import service_command
from trireme.launch.process import ALWAYS


def check_data(path: Path, overrides: Sequence[str], timeout_s: float) -> None:
    """Raises ConfigError with what the trainer says against the prompts of configuration `path`."""
    command = service_command("trainer", path, [*overrides, "--check-data"])
    try:
        done = subprocess.run(
            command, env={**os.environ, **ALWAYS}, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"reading the data of {path} took over {timeout_s:g} s (trainer.startup_timeout_s)") from None
    if done.returncode:
        raise ConfigError(done.stderr.strip() or f"reading the data of {path} ended with code {done.returncode}")
