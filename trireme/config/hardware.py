"""Which compute precision this machine multiplies natively, without importing torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

CPU_FLAGS = {"avx512_bf16", "amx_bf16"}


def native_precision(cpuinfo: Path | None = None, devices: Path | None = None) -> str:
    """`bfloat16` with a usable CUDA device or a CPU that has bf16 instructions, else `float32`."""
    if _has_cuda(devices or Path("/dev"), os.environ) or _has_bf16(cpuinfo or Path("/proc/cpuinfo")):
        return "bfloat16"
    return "float32"


def _has_cuda(devices: Path, environment: Mapping[str, str]) -> bool:
    """A device node stands there and the environment does not hide it."""
    hidden = environment.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return not hidden and any(devices.glob("nvidia[0-9]*"))


def _has_bf16(cpuinfo: Path) -> bool:
    if not cpuinfo.is_file():
        return False
    lines = cpuinfo.read_text(errors="replace").splitlines()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return not CPU_FLAGS.isdisjoint(flags.split())
