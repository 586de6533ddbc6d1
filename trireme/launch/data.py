"""Reading a run's data and loading its verifiers before anything is started, in processes of the services, which alone
know how."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from trireme.config import Config, ConfigError
from trireme.launch.plan import service_command
from trireme.launch.process import ALWAYS
from trireme.registry import Kind


def check_data(path: Path, overrides: Sequence[str], config: Config) -> None:
    """Raises ConfigError with what the trainer says against the prompts of configuration `path`, or the reward service
    against its verifiers."""
    _ask("trainer", "--check-data", path, overrides, config.trainer.startup_timeout_s)
    if config.reward.verifiers:
        _ask("reward", "--check-verifiers", path, overrides, config.trainer.startup_timeout_s)


def _ask(kind: Kind, question: str, path: Path, overrides: Sequence[str], timeout_s: float) -> None:
    command = service_command(kind, path, [*overrides, question])
    try:
        done = subprocess.run(
            command, env={**os.environ, **ALWAYS}, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{kind} {question} took over {timeout_s:g} s (trainer.startup_timeout_s)") from None
    if done.returncode:
        raise ConfigError(done.stderr.strip() or f"{kind} {question} ended with code {done.returncode}")
