"""The committed code is what the contracts generate, and what is installed can run it."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from trireme.contracts.generate import REPOSITORY, TARGET, generate

GENERATED = sorted(path for path in TARGET.glob("*_pb2*") if path.suffix in (".py", ".pyi"))


def test_committed_code_is_generated_from_the_contracts(tmp_path: Path) -> None:
    generate(tmp_path)
    fresh = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert fresh == {path.name: path.read_text() for path in GENERATED}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:3]))


def _generator(pattern: str) -> set[tuple[int, ...]]:
    """Versions that generated files name."""
    texts = (path.read_text() for path in GENERATED)
    return {_numbers(found[1]) for text in texts if (found := re.search(pattern, text))}


PROTOBUF = r"Protobuf Python Version: ([\d.]+)"
GRPC = r"GRPC_GENERATED_VERSION = '([\d.]+)'"


@pytest.mark.parametrize(("package", "pattern"), [("protobuf", PROTOBUF), ("grpcio", GRPC)])
def test_runtime_is_not_older_than_the_generated_code(package: str, pattern: str) -> None:
    """Q-04: code from a generator newer than the runtime fails at import."""
    (generated,) = _generator(pattern)
    assert generated <= _numbers(version(package))
    if package == "protobuf":  # a runtime serves code of its own and the previous major version
        assert _numbers(version(package))[0] - generated[0] in (0, 1)


@pytest.mark.parametrize(("package", "pattern"), [("protobuf", PROTOBUF), ("grpcio", GRPC)])
def test_no_installation_gets_an_older_runtime(package: str, pattern: str) -> None:
    """Q-04: the pins of the distribution exclude runtimes that the generated code refuses."""
    (generated,) = _generator(pattern)
    bound = re.search(rf'"{package}>=([\d.]+)', (REPOSITORY / "pyproject.toml").read_text())
    assert bound is not None
    assert _numbers(bound[1]) >= generated, f"pyproject.toml must ask for {package}>={'.'.join(map(str, generated))}"


def test_light_parts_import_no_heavy_library() -> None:
    """The base install has none of them, and a service must not pay for another's."""
    modules = [f"trireme.contracts.v1.{path.stem}" for path in GENERATED if path.suffix == ".py"]
    modules += [f"trireme.contracts.{name}" for name in ("grpc", "ids", "spans", "samples", "rewards", "generate")]
    modules += ["trireme.streams.embedded", "trireme.streams.lease", "trireme.registry"]
    modules += ["trireme.telemetry", "trireme.streams.tether"]
    heavy = ("torch", "vllm", "transformers", "megatron", "numpy")
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
    code += f"print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_every_call_must_state_a_deadline() -> None:
    """Clients without a deadline hang with their server: the types refuse them."""
    code = (
        "import grpc\nfrom trireme.contracts.v1 import trainer_pb2, trainer_pb2_grpc\n"
        "stub = trainer_pb2_grpc.TrainerServiceStub(grpc.insecure_channel('x'))\n"
        "stub.GetStatus(trainer_pb2.TrainerStatusRequest())\n"
        "stub.GetStatus(trainer_pb2.TrainerStatusRequest(), timeout=1.0)\n"
    )
    options = ["--no-error-summary", "--config-file=", "--follow-imports=silent"]
    command = [sys.executable, "-m", "mypy", *options, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert [line for line in done.stdout.splitlines() if "error:" in line] == [
        '<string>:4: error: Missing named argument "timeout" for "GetStatus" of "TrainerServiceStub"  [call-arg]'
    ]
