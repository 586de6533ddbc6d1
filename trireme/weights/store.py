"""What a publisher has on offer: the latest two versions, a segment each. Both transports publish through this."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from trireme.contracts.v1.weights_pb2 import WeightManifest
from trireme.weights.segment import SUFFIX, Segment, clean_stale

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

SHM = Path("/dev/shm")
PREFIX = "trireme-"
# A reader that was told of version v may begin to read while v + 1 is being offered.
KEEP = 2


def prefix(run: str) -> str:
    """What the file names of a run's segments begin with: readable, and different for every run."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", run)[:40]
    return f"{PREFIX}{readable}-{hashlib.blake2s(run.encode(), digest_size=6).hexdigest()}-"


def new_path(directory: Path, run: str, version: int) -> Path:
    """A path that no other process uses, recognised by `clean_stale` under the run's prefix."""
    return directory / f"{prefix(run)}v{version}-{os.getpid()}-{uuid.uuid4().hex[:8]}{SUFFIX}"


class Store:
    """Segments of one run in one directory, by version. They are deleted with the process, or by the next store."""

    def __init__(self, run: str, directory: Path) -> None:
        self._run, self._directory = run, directory
        self._segments: dict[int, Segment] = {}
        for path in clean_stale(directory, PREFIX):  # of any run: nobody may ever start this one's again
            log.info("removed weights of a publisher that died", extra={"path": str(path)})

    def put(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> Segment:
        """Write a version and put it on offer in one step. Raises WeightsError; nothing is left behind then."""
        self._make_room(manifest.version)
        final = new_path(self._directory, self._run, manifest.version)
        segment = Segment.create(final.with_name(final.name + ".partial"), manifest)
        try:
            segment.write_all(tensors)
            segment.rename(final)
        except BaseException:  # whatever it was, half a version must not stay in memory
            segment.close()
            raise
        self.withdraw(manifest.version)
        self._segments[manifest.version] = segment
        return segment

    def get(self, version: int) -> Segment | None:
        return self._segments.get(version)

    def withdraw(self, version: int) -> None:
        if (segment := self._segments.pop(version, None)) is not None:
            segment.close()

    def close(self) -> None:
        for version in list(self._segments):
            self.withdraw(version)

    def _make_room(self, version: int) -> None:
        for old in [v for v in self._segments if v != version][: -(KEEP - 1)]:
            self.withdraw(old)
