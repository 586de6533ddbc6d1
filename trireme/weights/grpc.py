"""The gRPC transport: the trainer keeps a version in a file, rollout servers stream it from FetchWeights in chunks."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from trireme.contracts.grpc import sync_channel
from trireme.contracts.v1 import trainer_pb2, trainer_pb2_grpc
from trireme.contracts.v1.weights_pb2 import WeightChunk, WeightManifest
from trireme.weights.base import boot_id
from trireme.weights.manifest import WeightsError, layout
from trireme.weights.segment import NoRoomError, Segment
from trireme.weights.store import SHM, Store, new_path

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


class GrpcTransport:
    """Publishes at `address`, whose server answers FetchWeights through `serving.stream_chunks`.

    `directory` holds the offered and the received bytes; None takes shared memory where a version fits, else the
    temporary directory.
    """

    def __init__(self, run: str, *, address: str = "", directory: Path | None = None) -> None:
        self._run, self._address, self._directory = run, address, directory
        self._store: Store | None = None

    def offer(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> WeightManifest:
        if self._store is None:
            self._store = Store(self._run, self._spool(manifest))
        self._store.put(manifest, tensors)
        offered = WeightManifest()
        offered.CopyFrom(manifest)
        offered.transport, offered.location, offered.host = "grpc", self._address, boot_id()
        return offered

    def stage(self, manifest: WeightManifest, timeout_s: float) -> Segment:
        """Receive a version from its trainer into a file of our own and verify it, all within `timeout_s`."""
        segment = Segment.create(new_path(self._spool(manifest), self._run, manifest.version), manifest)
        try:
            self._receive(segment, timeout_s)
            return segment.verify()
        except BaseException:  # whatever it was, a partial copy must not stay in memory
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

    def _receive(self, segment: Segment, timeout_s: float) -> None:
        version, received = segment.manifest.version, 0
        address = source(segment.manifest)
        with sync_channel(address) as channel:
            stub = trainer_pb2_grpc.TrainerServiceStub(channel)
            try:
                for chunk in stub.FetchWeights(trainer_pb2.FetchWeightsRequest(version=version), timeout=timeout_s):
                    received += _write(segment, chunk)
            except grpc.RpcError as error:
                raise WeightsError(
                    f"fetching weights version {version} from {address}: {error.code().name} {error.details()}"
                ) from error
        if received != (expected := sum(t.nbytes for t in segment.manifest.tensors)):
            raise WeightsError(f"weights version {version} from {address}: {received} of {expected} bytes came")

    def _spool(self, manifest: WeightManifest) -> Path:
        if self._directory is not None:
            return self._directory
        # Twice: a version may stay while the next one arrives.
        fits = SHM.is_dir() and shutil.disk_usage(SHM).free >= 2 * layout(manifest)[1]
        return SHM if fits else Path(tempfile.gettempdir())


def source(manifest: WeightManifest) -> str:
    """The address that serves a manifest's bytes over gRPC. Raises WeightsError when it names none."""
    address = manifest.location if manifest.transport == "grpc" else manifest.fallback_address
    if not address:
        raise WeightsError(
            f"weights version {manifest.version} were published by {manifest.transport or 'nobody'} on another host, "
            "and the manifest names no address to fetch them from"
        )
    return address


def _write(segment: Segment, chunk: WeightChunk) -> int:
    if chunk.tensor >= len(segment.manifest.tensors):
        raise WeightsError(f"a chunk of tensor {chunk.tensor} came, of {len(segment.manifest.tensors)}")
    segment.write(chunk.tensor, chunk.offset, chunk.data)
    return len(chunk.data)


__all__ = ["GrpcTransport", "NoRoomError", "source"]
