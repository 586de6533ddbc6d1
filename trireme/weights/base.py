"""The Transport port: how the bytes of published weights get from the trainer to a rollout server.

`shm.py` is for processes that share /dev/shm, `grpc.py` for all others; a further one is one more file. Both keep
the bytes in a `segment.Segment`, one file per version, so that a reader never holds a model twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trireme.contracts.v1.weights_pb2 import WeightManifest
from trireme.weights.manifest import WeightsError
from trireme.weights.segment import Segment

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Transport", "WeightsError", "boot_id", "same_host"]


class Transport(Protocol):
    """Moves versions. Methods block; call them outside an event loop."""

    def offer(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> WeightManifest:
        """Make a version fetchable before returning, and give the manifest with location and checksums filled in.

        The tensors are copied one by one: the caller may change them afterwards, and need not hold them all. The
        version before stays fetchable, older ones do not. Raises WeightsError when there is no room, before the first
        tensor is taken, or when they are not the manifest's; then nothing of the version is left behind.
        """
        ...

    def stage(self, manifest: WeightManifest, timeout_s: float) -> Segment:
        """A local, complete and verified copy of a version, for the caller to close.

        Raises WeightsError, naming version and tensor, when it is gone, damaged or late.
        """
        ...

    def fetch(self, manifest: WeightManifest, timeout_s: float) -> Iterator[tuple[str, Tensor]]:
        """The verified tensors of a version; each stays valid as long as the caller keeps it."""
        ...

    def published(self, version: int) -> Segment | None:
        """The offered bytes of `version`, or None when it is not (or no longer) on offer here."""
        ...

    def withdraw(self, version: int) -> None:
        """Take `version` off offer; who is reading it can finish. Unknown versions are ignored."""
        ...

    def close(self) -> None:
        """Withdraw everything."""
        ...


@cache
def boot_id() -> str:
    """What identifies this running machine ("" where the system does not say)."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def same_host(manifest: WeightManifest) -> bool:
    """Whether the manifest was published on this machine. Its memory may still be another container's."""
    return bool(manifest.host) and manifest.host == boot_id()
