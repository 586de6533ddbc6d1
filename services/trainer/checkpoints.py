"""Checkpoints of a run: written beside, made durable, renamed; the newest and the best k are kept.

A checkpoint is a folder `step_<n>` holding `policy/` (the backend's) and `state.json` (the loop's). A folder under
any other name is an unfinished one: a kill at any moment leaves the previous checkpoints as they were.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from services.trainer.durable import sync

log = logging.getLogger(__name__)

STEP_FOLDER = re.compile(r"^step_(\d+)$")
UNFINISHED = "unfinished_step_"
CHECKSUM = "checksum"


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message names the folder."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path

    def state(self) -> dict[str, Any]:
        """The loop's state. Raises CheckpointError naming the file when it is missing, damaged or another step's."""
        file = self.path / "state.json"
        try:
            return _parse(file.read_text(encoding="utf-8"), self.step)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{file} is missing or damaged ({error}); delete {self.path} to use an older one"
            ) from error

    @property
    def policy(self) -> Path:
        return self.path / "policy"


def _format(state: Mapping[str, Any]) -> str:
    return json.dumps({CHECKSUM: _checksum(state), **state})


def _parse(text: str, step: int) -> dict[str, Any]:
    """Inverse of `_format`. Raises ValueError saying what is wrong."""
    state = json.loads(text)
    if not isinstance(state, dict):
        raise ValueError("no JSON object")
    checksum = state.pop(CHECKSUM, None)
    if checksum not in (None, _checksum(state)):  # the first versions wrote none
        raise ValueError("its checksum is another")
    if state.get("step", step) != step:
        raise ValueError(f"it is of step {state['step']}")
    return state


def _checksum(state: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(state).encode())


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
        work, text = self.directory / f"{UNFINISHED}{step}", _format(state)
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
            # A run resumed from an older checkpoint writes this step again.
            replaced = self._aside(final) if final.exists() else None
            work.rename(final)
            sync(self.directory)
        if replaced is not None:
            _discard(replaced)
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
            _discard(path)

    def _prune(self) -> None:
        checkpoints = self.all()
        if self._keep is None or len(checkpoints) <= self._keep:
            return
        older = sorted(checkpoints[:-1], key=self._rank, reverse=True)  # the newest is never a candidate
        for checkpoint in older[self._keep - 1 :]:
            _discard(self._aside(checkpoint.path))

    def _aside(self, path: Path) -> Path:
        """Under a name that is no checkpoint's, so that a kill while it is removed leaves no half of one."""
        return path.rename(self.directory / f"{UNFINISHED}removal_of_{path.name}")

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


def _discard(folder: Path) -> None:
    """What cannot be removed costs space, not the run: the next save tries again."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        log.warning("a folder could not be removed", extra={"folder": str(folder), "reason": str(error)})


def _free_mib(path: Path) -> int:
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(existing).free >> 20
