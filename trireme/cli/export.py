"""`trireme export`: become the trainer's export of a checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from trireme.cli.console import refuse
from trireme.launch.plan import PlanError, require_installed


def export(checkpoint: Path, folder: Path, model: Path | None, precision: str | None, *, force: bool) -> NoReturn:
    """Replaces this process, so that exit codes are the export's own."""
    try:
        require_installed("trainer", None)
    except PlanError as error:
        refuse(str(error))
    command = [sys.executable, "-m", "services.trainer.export_checkpoint", str(checkpoint), str(folder)]
    command += ["--model", str(model)] if model else []
    command += ["--precision", precision] if precision else []
    command += ["--force"] if force else []
    os.execvpe(command[0], command, {**os.environ, "PYTHONWARNINGS": "ignore"})
