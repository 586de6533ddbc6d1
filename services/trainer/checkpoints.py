"""Checkpoints of a run: written beside, made durable, renamed; the newest and the best k are kept.

A checkpoint is a folder `step_<n>` holding `policy/` (the backend's) and `state.json` (the loop's). A folder under
any other name is an unfinished one: a kill at any moment leaves the previous checkpoints as they were.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.trainer.durable import sync

STEP_FOLDER = re.compile(r"^step_(\d+)$")
UNFINISHED = "unfinished_step_"


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message names the folder."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path

    def state(self) -> dict[str, Any]:
        """The loop's state. Raises CheckpointError naming the file when it is missing or damaged."""
        file = self.path / "state.json"
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{file} is missing or damaged ({error}); delete {self.path} to use an older one"
            ) from error

    @property
    def policy(self) -> Path:
        return self.path / "policy"


class Checkpoints:
    """The checkpoint folder of one run.

    keep_top_k: how many to keep by `metric_name` (None keeps all); the newest is always kept, and those whose step was
    not measured come after those whose step was.
    """

    def __init__(self, directory: Path, keep_top_k: int | None, metric_name: str | None, higher_is_better: bool):
        self.directory = directory
        self._keep, self._metric, self._higher = keep_top_k, metric_name, higher_is_better

    def all(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        found = [(STEP_FOLDER.match(path.name), path) for path in self.directory.iterdir()]
        return sorted((Checkpoint(int(m[1]), path) for m, path in found if m), key=lambda item: item.step)

    def latest(self) -> Checkpoint | None:
        return next(reversed(self.all()), None)

    def save(
        self, step: int, state: Mapping[str, Any], save_policy: Callable[[Path], Future[None]]
    ) -> Callable[[], Checkpoint]:
        """Begin checkpoint `step`, of `state` and the policy as they are now. The call that is returned waits for the
        policy's future and completes it; before that it is none. One at a time.

        Both raise CheckpointError, with the older ones intact, when it cannot be written.
        """
        self._clear_unfinished()
        work, text = self.directory / f"{UNFINISHED}{step}", json.dumps(state)
        with self._failing(step, work):
            (work / "policy").mkdir(parents=True)
            saving = save_policy(work / "policy")
        return lambda: self._complete(step, text, saving, work)

    def _complete(self, step: int, state: str, saving: Future[None], work: Path) -> Checkpoint:
        final = self.directory / f"step_{step}"
        with self._failing(step, work):
            saving.result()
            (work / "state.json").write_text(state, encoding="utf-8")
            for path in (work / "state.json", work):
                sync(path)
            if final.exists():  # a run resumed from an older checkpoint writes this step again
                self._remove(final)
            work.rename(final)
            sync(self.directory)
        self._prune()
        return Checkpoint(step, final)

    @contextmanager
    def _failing(self, step: int, work: Path) -> Iterator[None]:
        """An OSError inside is a CheckpointError, and leaves nothing behind."""
        try:
            yield
        except OSError as error:
            shutil.rmtree(work, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint of step {step} could not be written to {self.directory}: {error.strerror or error}"
                f" ({_free_mib(self.directory)} MiB free); earlier checkpoints are intact"
            ) from error

    def _clear_unfinished(self) -> None:
        for path in self.directory.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path)

    def _prune(self) -> None:
        checkpoints = self.all()
        if self._keep is None or len(checkpoints) <= self._keep:
            return
        older = sorted(checkpoints[:-1], key=self._rank, reverse=True)  # the newest is never a candidate
        for checkpoint in older[self._keep - 1 :]:
            self._remove(checkpoint.path)

    def _remove(self, path: Path) -> None:
        """A kill in the middle leaves it under a name that is no checkpoint's."""
        aside = path.rename(self.directory / f"{UNFINISHED}removal_of_{path.name}")
        shutil.rmtree(aside)

    def _rank(self, checkpoint: Checkpoint) -> tuple[bool, float, int]:
        """Better is larger: by the metric where it was measured, then by step."""
        value = self._measured(checkpoint)
        if value is None or math.isnan(value):
            return (False, 0.0, checkpoint.step)
        return (True, value if self._higher else -value, checkpoint.step)

    def _measured(self, checkpoint: Checkpoint) -> float | None:
        """An older checkpoint that cannot be read ranks as one that was not measured: the new one is complete."""
        if self._metric is None:
            return None
        with suppress(CheckpointError):
            return checkpoint.state().get("metrics", {}).get(self._metric)
        return None


def _free_mib(path: Path) -> int:
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(existing).free >> 20
