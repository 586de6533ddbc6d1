"""Regenerates `trireme/contracts/v1` from `proto/trireme/v1`: `python -m trireme.contracts.generate [FOLDER]`.

protoc imports by proto path (`trireme.v1`), which is not where the code lives, so imports are rewritten afterwards.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PROTOS = REPOSITORY / "proto"
TARGET = REPOSITORY / "trireme" / "contracts" / "v1"
_IMPORT = re.compile(r"^(from|import) trireme\.v1\b", re.MULTILINE)


def generate(target: Path) -> list[Path]:
    """Write modules and type stubs of every contract into the existing folder `target`; the paths written, sorted.

    Raises RuntimeError when protoc refuses the contracts (it has then said why on stderr).
    """
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("trireme/v1/*.proto"))
    if not sources:
        raise RuntimeError(f"no contracts under {PROTOS}: generate from a checkout of the repository")
    scratch = target / "_protoc"
    scratch.mkdir()
    _protoc([f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")], sources)
    written = [_adopt(path, target) for path in sorted((scratch / "trireme" / "v1").iterdir())]
    for folder in (scratch / "trireme" / "v1", scratch / "trireme", scratch):
        folder.rmdir()
    return written


def _protoc(outputs: Sequence[str], sources: Sequence[str]) -> None:
    from grpc_tools import protoc

    include = str(resources.files("grpc_tools") / "_proto")
    if protoc.main(["protoc", f"-I{PROTOS}", f"-I{include}", *outputs, *sources]) != 0:
        raise RuntimeError(f"protoc refused {', '.join(sources)}")


def _adopt(path: Path, target: Path) -> Path:
    """Move a generated file into `target`, its imports pointing at the package."""
    adopted = target / path.name
    adopted.write_text(_IMPORT.sub(r"\1 trireme.contracts.v1", path.read_text()))
    path.unlink()
    return adopted


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
