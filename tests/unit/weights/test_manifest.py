"""Manifests: what is described is what is there."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import xxhash
from safetensors.torch import save
from torch import Tensor

from trireme.weights.manifest import ALIGNMENT, WeightsError, build, check_sizes, layout, verify

Named = list[tuple[str, Tensor]]


def test_names_dtypes_and_shapes_are_those_of_safetensors(tensors: Named) -> None:
    """The reference is the header that safetensors itself writes."""
    import json

    data = save({name: tensor.contiguous() for name, tensor in tensors})
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for info in build(3, "r", tensors).tensors:
        assert info.dtype == header[info.name]["dtype"]
        assert list(info.shape) == header[info.name]["shape"]
        start, end = header[info.name]["data_offsets"]
        assert info.nbytes == end - start


def test_checksum_is_of_the_raw_bytes(tensors: Named) -> None:
    infos = {info.name: info for info in build(3, "r", tensors).tensors}
    for name, tensor in tensors:
        raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
        assert infos[name].checksum == xxhash.xxh3_128(raw).hexdigest()


def test_a_name_twice_is_refused(tensors: Named) -> None:
    with pytest.raises(WeightsError, match="'scalar' comes twice"):
        build(1, "r", [*tensors, tensors[3]])


def test_a_dtype_that_cannot_be_published_is_refused() -> None:
    with pytest.raises(WeightsError, match="'z'.*complex64"):
        build(1, "r", [("z", torch.zeros(2, dtype=torch.complex64))])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t + 1, "checksum"),
        (lambda t: t.double(), "dtype"),
        (lambda t: t.reshape(7, 301), "shape"),
    ],
)
def test_verify_names_the_tensor_and_what_differs(tensors: Named, change: object, message: str) -> None:
    manifest = build(1, "r", tensors)
    name, tensor = tensors[0]
    verify(manifest, name, tensor)
    with pytest.raises(WeightsError, match=f"model.embed_tokens.weight.*{message}"):
        verify(manifest, name, change(tensor))  # type: ignore[operator]


def test_verify_refuses_a_tensor_of_another_model(tensors: Named) -> None:
    with pytest.raises(WeightsError, match="'other' is not part of version 7"):
        verify(build(7, "r", tensors), "other", tensors[0][1])


def test_layout_is_aligned_and_without_overlap(tensors: Named) -> None:
    manifest = build(1, "r", tensors)
    offsets, size = layout(manifest)
    ends = [start + info.nbytes for start, info in zip(offsets, manifest.tensors, strict=True)]
    assert all(start % ALIGNMENT == 0 for start in offsets)
    assert all(end <= start for end, start in zip(ends, offsets[1:], strict=False))
    assert size == max(ends)


def test_sizes_that_do_not_follow_from_dtype_and_shape_are_refused(tensors: Named) -> None:
    manifest = build(1, "r", tensors)
    manifest.tensors[1].nbytes += 2
    with pytest.raises(WeightsError, match=r"model.layers.0.q.weight.*32 bytes.*takes 30"):
        check_sizes(manifest)


def test_manifest_needs_no_torch() -> None:
    code = "import sys, trireme.weights.manifest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_hashing_is_stable_across_releases() -> None:
    """A published constant of the algorithm (XXH3_128bits of no bytes), so that two releases agree."""
    assert build(1, "r", [("e", torch.empty(0))]).tensors[0].checksum == "99aa06d3014798d86001c324468d497f"
