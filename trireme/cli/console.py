"""How commands speak: results on standard output, trouble on standard error, a code that tells scripts which."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

USAGE = 2  # the input is wrong; nothing has been started

out = Console()
err = Console(stderr=True)


def refuse(message: str, code: int = USAGE) -> NoReturn:
    """Print what is wrong, without a traceback, and leave."""
    err.print(f"[bold red]error:[/] {_plain(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def _plain(message: str) -> str:
    return message.replace("[", r"\[")
