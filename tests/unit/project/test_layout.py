"""Rules of the code base as a whole: who may import whom, and how long things may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GENERATED = ROOT / "trireme" / "contracts" / "v1"
SOURCES = sorted(
    path for part in ("trireme", "services") for path in (ROOT / part).rglob("*.py") if GENERATED not in path.parents
)
LONGEST_FUNCTION = 80
LONGEST_FILE = 400
SERVICES = ("rollout", "reward", "trainer")


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_never_imports_another(service: str) -> None:
    others = tuple(f"services.{other}" for other in SERVICES if other != service)
    own = [path for path in SOURCES if (ROOT / "services" / service) in path.parents]
    assert own
    assert not [(name(path), found) for path in own for found in imports(path) if found.startswith(others)]


def test_shared_code_never_imports_a_service() -> None:
    shared = [path for path in SOURCES if (ROOT / "trireme") in path.parents]
    assert not [(name(path), found) for path in shared for found in imports(path) if found.startswith("services")]


def test_functions_and_files_stay_short() -> None:
    long = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > LONGEST_FILE:
            long.append(f"{name(path)}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    long.append(f"{name(path)}: {node.name} has {length} lines")
    assert not long
