"""Manifests: what one published set of weights consists of, tensor by tensor, with checksums.

Importing this needs no torch; only building and verifying, which touch tensors, do.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

import xxhash

from trireme.contracts.v1.weights_pb2 import TensorInfo, WeightManifest

if TYPE_CHECKING:
    from torch import Tensor, dtype

# Tensors start at multiples of this in a segment, so that a view of any dtype is aligned.
ALIGNMENT = 64

# safetensors dtype name -> (torch attribute, bytes per element).
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}


class WeightsError(RuntimeError):
    """Weights are missing, damaged, or cannot be moved. The message names the tensor, file or version."""


def build(version: int, run: str, tensors: Iterable[tuple[str, Tensor]]) -> WeightManifest:
    """Describe `tensors` (Hugging Face name, tensor on any device) in the order given, without keeping them.

    Raises WeightsError for a name that comes twice or a dtype that safetensors has no name for.
    """
    manifest = WeightManifest(version=version, run=run)
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise WeightsError(f"tensor {name!r} comes twice in version {version}")
        seen.add(name)
        manifest.tensors.append(describe(name, tensor))
    return manifest


def describe(name: str, tensor: Tensor) -> TensorInfo:
    """Name, dtype, shape, size and checksum of one tensor."""
    data = tensor_bytes(tensor)
    return TensorInfo(
        name=name,
        dtype=dtype_name(name, tensor.dtype),
        shape=list(tensor.shape),
        nbytes=data.nbytes,
        checksum=checksum(data),
    )


def verify(manifest: WeightManifest, name: str, tensor: Tensor) -> None:
    """Raise WeightsError, naming the tensor and what differs, unless `tensor` is what the manifest describes."""
    info = next((t for t in manifest.tensors if t.name == name), None)
    if info is None:
        raise WeightsError(f"tensor {name!r} is not part of version {manifest.version}")
    found = describe(name, tensor)
    for field in ("dtype", "shape", "checksum"):
        if getattr(found, field) != getattr(info, field):
            raise WeightsError(
                f"tensor {name!r} of version {manifest.version}: {field} is {getattr(found, field)}, "
                f"the manifest says {getattr(info, field)}"
            )


def check_sizes(manifest: WeightManifest) -> None:
    """Raise WeightsError unless every tensor's dtype is known and its size follows from dtype and shape."""
    for info in manifest.tensors:
        if info.dtype not in DTYPES:
            raise WeightsError(f"tensor {info.name!r}: dtype {info.dtype!r} is not one of {', '.join(DTYPES)}")
        expected = prod(info.shape) * DTYPES[info.dtype][1]
        if info.nbytes != expected:
            raise WeightsError(
                f"tensor {info.name!r}: {info.nbytes} bytes, but {info.dtype} {list(info.shape)} takes {expected}"
            )


def layout(manifest: WeightManifest) -> tuple[list[int], int]:
    """Where each tensor begins in a segment, in bytes, and the size of the whole segment."""
    offsets, end = [], 0
    for info in manifest.tensors:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + info.nbytes
    return offsets, end


def checksum(data: memoryview | bytes) -> str:
    """xxh3_128 of the bytes, hex. Guards against damage and mix-ups, not against malice."""
    return xxhash.xxh3_128_hexdigest(data)


def dtype_name(name: str, dtype: dtype) -> str:
    """The safetensors name of a torch dtype."""
    attribute = str(dtype).removeprefix("torch.")
    for known, (torch_name, _) in DTYPES.items():
        if torch_name == attribute:
            return known
    raise WeightsError(f"tensor {name!r}: dtype {dtype} cannot be published")


def torch_dtype(name: str) -> dtype:
    """The torch dtype of a safetensors name."""
    import torch

    found: dtype = getattr(torch, DTYPES[name][0])
    return found


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a tensor, copied only when it is not contiguous on the CPU."""
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")
