"""Which transport a process uses: what `weights.transport` asks for, or what works.

`auto` publishes through shared memory and, when a version does not fit there, over gRPC. A receiver needs no
setting: the manifest says how its version was published, and shared memory counts only where it is visible.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trireme.contracts.v1.weights_pb2 import WeightManifest
from trireme.weights.base import Transport
from trireme.weights.grpc import GrpcTransport
from trireme.weights.segment import NoRoomError, Segment
from trireme.weights.shm import ShmTransport
from trireme.weights.store import SHM

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

Kind = Literal["auto", "shm", "grpc"]


def make_transport(kind: Kind, run: str, address: str, *, shm_directory: Path = SHM) -> Transport:
    """The trainer's transport; `address` is where its FetchWeights is reached."""
    if kind == "grpc":
        return GrpcTransport(run, address=address)
    shm = ShmTransport(run, fallback_address=address, directory=shm_directory)
    return shm if kind == "shm" else AutoTransport(run, shm, GrpcTransport(run, address=address))


class AutoTransport:
    """Shared memory where it works, gRPC otherwise; for publishing and for receiving."""

    def __init__(self, run: str, shm: ShmTransport, grpc: GrpcTransport) -> None:
        self._run, self._shm, self._grpc = run, shm, grpc

    def offer(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> WeightManifest:
        try:
            return self._shm.offer(manifest, tensors)
        except (NoRoomError, FileNotFoundError) as error:
            log.warning("shared memory cannot hold the weights, publishing over gRPC: %s", error)
            return self._grpc.offer(manifest, tensors)  # none was taken

    def stage(self, manifest: WeightManifest, timeout_s: float) -> Segment:
        return self._for(manifest).stage(manifest, timeout_s)

    def fetch(self, manifest: WeightManifest, timeout_s: float) -> Iterator[tuple[str, Tensor]]:
        return self._for(manifest).fetch(manifest, timeout_s)

    def published(self, version: int) -> Segment | None:
        return self._shm.published(version) or self._grpc.published(version)

    def withdraw(self, version: int) -> None:
        self._shm.withdraw(version)
        self._grpc.withdraw(version)

    def close(self) -> None:
        """Withdraw everything."""
        self._shm.close()
        self._grpc.close()

    def _for(self, manifest: WeightManifest) -> ShmTransport | GrpcTransport:
        return self._shm if self._shm.available(manifest) else self._grpc


def receiver(run: str) -> AutoTransport:
    """The transport of a rollout server of `run`."""
    return AutoTransport(run, ShmTransport(run), GrpcTransport(run))
