"""The shared-memory transport: one file per version in /dev/shm, which every process on the host maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trireme.contracts.v1.weights_pb2 import WeightManifest
from trireme.weights.base import boot_id, same_host
from trireme.weights.manifest import WeightsError
from trireme.weights.segment import SUFFIX, Segment
from trireme.weights.store import SHM, Store, prefix

if TYPE_CHECKING:
    from torch import Tensor


class ShmTransport:
    """Publishes into, and reads from, `directory`. `fallback_address`: the trainer that serves the same bytes."""

    def __init__(self, run: str, *, fallback_address: str = "", directory: Path = SHM) -> None:
        self._run, self._directory, self._fallback = run, directory, fallback_address
        self._store: Store | None = None

    def offer(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> WeightManifest:
        """Put a version into shared memory. Raises NoRoomError when it does not fit."""
        if self._store is None:
            self._store = Store(self._run, self._directory)
        segment = self._store.put(manifest, tensors)
        offered = WeightManifest()
        offered.CopyFrom(manifest)
        offered.transport, offered.location, offered.host = "shm", str(segment.path), boot_id()
        offered.fallback_address = self._fallback
        return offered

    def available(self, manifest: WeightManifest) -> bool:
        """Whether this process sees the publisher's shared memory: same machine and same /dev/shm."""
        return manifest.transport == "shm" and same_host(manifest) and self._path(manifest).exists()

    def stage(self, manifest: WeightManifest, timeout_s: float) -> Segment:
        """The publisher's own file, verified; nothing is copied. `timeout_s` is not needed: nothing is waited for."""
        segment = Segment.open(self._path(manifest), manifest)
        try:
            return segment.verify()
        except WeightsError:
            segment.close()
            raise

    def fetch(self, manifest: WeightManifest, timeout_s: float) -> Iterator[tuple[str, Tensor]]:
        with self.stage(manifest, timeout_s) as segment:
            yield from segment.tensors()

    def published(self, version: int) -> Segment | None:
        return self._store.get(version) if self._store else None

    def withdraw(self, version: int) -> None:
        if self._store:
            self._store.withdraw(version)

    def close(self) -> None:
        """Withdraw everything."""
        if self._store:
            self._store.close()

    def _path(self, manifest: WeightManifest) -> Path:
        """The segment's path. Raises WeightsError unless it is a segment of this run in this directory."""
        path = Path(manifest.location)
        if path.parent != self._directory or not path.name.startswith(prefix(self._run)) or path.suffix != SUFFIX:
            raise WeightsError(f"{manifest.location!r} is not a weights segment of run {self._run!r}")
        return path
