"""`trireme config`: check a configuration, show it with everything filled in, or list all keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from trireme.config import ConfigError
from trireme.config.loader import Loaded, load
from trireme.config.model_rules import check_model_folder

BAD_INPUT = 2

app = typer.Typer(help="Check or show the configuration of a run.", no_args_is_help=True)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override.")]


@app.command()
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    model: Annotated[bool, typer.Option(help="Also check the model folder that the file names.")] = True,
    data: Annotated[
        bool,
        typer.Option(help="Also read the prompts and load the verifiers, as `up` does; needs the services."),
    ] = False,
) -> None:
    """Check a file and everything it names, without starting anything; exit code 2 and the reason where it is wrong."""
    with refusing_bad_input():
        loaded = _load(config, overrides)
        found = check_model_folder(loaded.config) if model else None
        if data:
            from trireme.launch.data import check_data  # with gRPC and more behind it

            check_data(config, overrides or (), loaded.config)
    if model and found is None:
        typer.echo(f"note: {loaded.config.policy.model_name} is not on this machine, so it was not checked", err=True)
    typer.echo(f"{config}: ok")


@app.command()
def show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print the resolved configuration as YAML, passwords hidden."""
    with refusing_bad_input():
        loaded = _load(config, overrides)
    typer.echo(loaded.config.to_yaml(mask=True), nl=False)


@app.command()
def reference(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; without it, print.")] = None,
) -> None:
    """Print the reference of all keys, in Markdown."""
    from trireme.config.reference import render

    if output is None:
        typer.echo(render(), nl=False)
    else:
        output.write_text(render(), encoding="utf-8")


@contextmanager
def refusing_bad_input() -> Iterator[None]:
    """Turn a ConfigError into its message on stderr and exit code 2, without a traceback."""
    try:
        yield
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from error


def _load(config: Path, overrides: list[str] | None) -> Loaded:
    loaded = load(config, overrides or ())
    for notice in loaded.notices:
        typer.echo(f"warning: {notice}", err=True)
    return loaded
