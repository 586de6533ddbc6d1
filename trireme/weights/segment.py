"""Segments: one file that holds all tensors of a version back to back, as the manifest lays them out.

A segment's writer and its readers hold a shared lock on the file for as long as they need it. The lock dies with
its holder, in whatever container that ran, which is how segments of dead publishers are told from living ones.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trireme.contracts.v1.weights_pb2 import WeightManifest
from trireme.weights.manifest import WeightsError, check_sizes, checksum, layout, tensor_bytes, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".weights"
# A file this young may belong to a writer that has not locked it yet.
UNLOCKED_GRACE_S = 10.0


class NoRoomError(WeightsError):
    """The directory's file system cannot hold the segment."""


class Segment:
    """A version's bytes in one file. `open` it to read, `create` it to write."""

    def __init__(self, path: Path, manifest: WeightManifest, fd: int, *, owned: bool) -> None:
        self.path, self.manifest = path, manifest
        self.offsets, self.size = layout(manifest)
        self._fd, self._owned = fd, owned

    @classmethod
    def create(cls, path: Path, manifest: WeightManifest) -> Segment:
        """A new file at `path` with room for everything, deleted again when the segment is closed.

        Raises NoRoomError naming what is needed and what is free, and WeightsError for a malformed manifest.
        """
        check_sizes(manifest)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        segment = cls(path, manifest, fd, owned=True)
        try:
            os.posix_fallocate(fd, 0, max(1, segment.size))
        except OSError as error:
            segment.close()
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = shutil.disk_usage(path.parent).free
                raise NoRoomError(
                    f"weights version {manifest.version} need {segment.size} bytes in {path.parent}, {free} are free"
                ) from error
            raise
        return segment

    @classmethod
    def open(cls, path: Path, manifest: WeightManifest) -> Segment:
        """An existing file, to read. Raises WeightsError when it is gone or has not the manifest's size."""
        check_sizes(manifest)
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise WeightsError(f"weights version {manifest.version}: {path} is gone (superseded?)") from error
        fcntl.flock(fd, fcntl.LOCK_SH)
        segment = cls(path, manifest, fd, owned=False)
        if (found := os.fstat(fd).st_size) != max(1, segment.size):
            segment.close()
            raise WeightsError(
                f"weights version {manifest.version}: {path} has {found} bytes, the manifest says {segment.size}"
            )
        return segment

    def write(self, index: int, offset: int, data: memoryview | bytes) -> None:
        """Put `data` at byte `offset` of tensor number `index`. Raises WeightsError when it would not fit there."""
        info = self.manifest.tensors[index]
        view = memoryview(data)
        if offset + view.nbytes > info.nbytes:
            raise WeightsError(f"tensor {info.name!r}: a piece ends at {offset + view.nbytes} of {info.nbytes} bytes")
        start = self.offsets[index] + offset
        while view.nbytes:
            written = os.pwrite(self._fd, view, start)
            view, start = view[written:], start + written

    def write_all(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write every tensor and note its checksum. Raises WeightsError unless they are the manifest's, in its order,
        of its dtypes and shapes."""
        index = -1
        for index, (name, tensor) in enumerate(tensors):
            if index >= len(self.manifest.tensors) or self.manifest.tensors[index].name != name:
                raise WeightsError(f"tensor number {index} is {name!r}, which the manifest has not at this place")
            info = self.manifest.tensors[index]
            if (torch_dtype(info.dtype), tuple(info.shape)) != (tensor.dtype, tuple(tensor.shape)):
                found = f"{tensor.dtype} {list(tensor.shape)}"
                raise WeightsError(f"tensor {name!r} is {found}, the manifest says {info.dtype} {list(info.shape)}")
            data = tensor_bytes(tensor)
            self.write(index, 0, data)
            info.checksum = checksum(data)
        if index + 1 != len(self.manifest.tensors):
            raise WeightsError(f"{index + 1} tensors for a manifest of {len(self.manifest.tensors)}")

    def rename(self, path: Path) -> None:
        """Give the file its final name, atomically."""
        os.rename(self.path, path)
        self.path = path

    def read(self, index: int, offset: int, length: int) -> bytes:
        """Up to `length` bytes of tensor number `index` from byte `offset` on."""
        length = min(length, self.manifest.tensors[index].nbytes - offset)
        return os.pread(self._fd, length, self.offsets[index] + offset)

    def verify(self) -> Segment:
        """Check every tensor's bytes against its checksum; WeightsError names the first that differs."""
        with mmap.mmap(self._fd, 0, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
            for info, start in zip(self.manifest.tensors, self.offsets, strict=True):
                if checksum(view[start : start + info.nbytes]) != info.checksum:
                    raise WeightsError(
                        f"tensor {info.name!r} of version {self.manifest.version}: checksum of {self.path} differs "
                        "from the manifest"
                    )
        return self

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the file's pages, copy on write; each keeps the mapping alive, also after `close`."""
        import torch

        mapped = mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)
        for info, start in zip(self.manifest.tensors, self.offsets, strict=True):
            dtype, shape = torch_dtype(info.dtype), tuple(info.shape)
            if not info.nbytes:
                yield info.name, torch.empty(shape, dtype=dtype)
                continue
            count = info.nbytes // dtype.itemsize
            yield info.name, torch.frombuffer(mapped, dtype=dtype, count=count, offset=start).view(shape)

    def close(self) -> None:
        """Let go of the file; who created it also deletes it. Twice is once."""
        if self._fd < 0:
            return
        if self._owned:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def clean_stale(directory: Path, prefix: str) -> list[Path]:
    """Delete segments whose names begin with `prefix` and that no living process holds; gives their paths."""
    return [path for path in directory.glob(f"{prefix}*{SUFFIX}*") if _unlink_if_unheld(path)]


def _unlink_if_unheld(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False  # gone meanwhile, or another user's
    try:
        if time.time() - os.fstat(fd).st_mtime < UNLOCKED_GRACE_S:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False  # held by a living process
    finally:
        os.close(fd)
    return True
