"""`python -m services.trainer.export_checkpoint CHECKPOINT OUT`: a checkpoint as a Hugging Face folder.

One process with the memory of one parameter and one file of the result, whatever layout trained it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from services.trainer.checkpoints import STEP_FOLDER

PRECISIONS = ("float32", "bfloat16")
EXIT_USAGE = 2


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What was given."""
    parser = argparse.ArgumentParser(prog="trireme export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a folder step_<n> of a run's checkpoints")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--model", type=Path, help="the folder that training began with")
    parser.add_argument("--precision", choices=PRECISIONS, help="of the weights written; as trained when left out")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    return parser.parse_args(arguments)


def run(given: argparse.Namespace) -> str:
    """Export, and say what was written. Raises ValueError or OSError naming what is wrong; then nothing is written."""
    started = time.monotonic()
    policy = find_policy(given.checkpoint)
    refuse_occupied(given.out, given.checkpoint, force=given.force)
    import torch  # what takes seconds comes after what is quick to refuse

    from services.trainer.backends.megatron import export, manifest
    from services.trainer.backends.megatron.families import read_architecture
    from services.trainer.backends.megatron.stored import StoredWeights

    model = given.model or policy / manifest.MODEL_FILES
    if not model.is_dir():
        raise ValueError(f"{model} is not there; name the folder that training began with (--model)")
    architecture = read_architecture(model)
    manifest.checked(policy, architecture)
    weights = StoredWeights(policy, architecture)
    dtype = getattr(torch, given.precision) if given.precision else weights.dtype
    export.export(weights.tensors(), model, given.out, dtype)
    name = str(dtype).removeprefix("torch.")
    return f"{given.out} written in {time.monotonic() - started:.0f} s: {architecture.name} in {name}"


def find_policy(checkpoint: Path) -> Path:
    """The backend's part of a checkpoint. Raises ValueError naming the checkpoints that are near."""
    if (checkpoint / "policy").is_dir():
        return checkpoint / "policy"
    folders = (checkpoint, checkpoint / "checkpoints", checkpoint.parent)
    near = sorted(path for folder in folders for path in folder.glob("step_*") if STEP_FOLDER.match(path.name))
    near = [path for path in near if path != checkpoint]
    here = f"; choose one of {', '.join(map(str, near))}" if near else ""
    what = "is not a checkpoint (a folder step_<n> with policy/ in it)" if checkpoint.exists() else "does not exist"
    raise ValueError(f"{checkpoint} {what}{here}")


def refuse_occupied(out: Path, checkpoint: Path, *, force: bool) -> None:
    """Raises ValueError when writing to `out` would destroy something that was not meant."""
    if out.resolve() in (checkpoint.resolve(), *checkpoint.resolve().parents):
        raise ValueError(f"cannot export to {out}: the checkpoint is in it")
    if out.exists() and not out.is_dir():
        raise ValueError(f"cannot export to {out}: it is a file")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise ValueError(f"{out} exists and is not empty; --force replaces it")
    if not out.resolve().parent.is_dir():
        raise ValueError(f"cannot export to {out}: {out.resolve().parent} is not a folder")


def main() -> int:
    """Exit code: 0 when the folder is there, 2 for anything that keeps it from being written."""
    try:
        sys.stdout.write(run(parse(sys.argv[1:])) + "\n")
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
