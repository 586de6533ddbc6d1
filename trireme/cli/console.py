"""How commands speak: results on standard output, trouble on standard error, a code that tells scripts which."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

USAGE = 2  # the input is wrong; nothing has been started

out = Console()
err = Console(stderr=True)


def refuse(message: str, code: int = USAGE) -> NoReturn:
    """Say what is wrong, without a traceback, and leave."""
    complain(message)
    raise typer.Exit(code)


def complain(message: str) -> None:
    err.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
