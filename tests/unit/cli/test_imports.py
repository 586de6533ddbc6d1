"""The base install has neither torch nor vLLM: the command must not need them, and must be quick."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "megatron", "transformers", "numpy", "datasets", "reasoning_gym")


@pytest.mark.parametrize(
    "module",
    [
        *("trireme.cli.main", "trireme.cli.up", "trireme.cli.serve", "trireme.cli.status", "trireme.cli.down"),
        *("trireme.cli.model", "trireme.cli.config", "trireme.launch.run", "trireme.launch.guard"),
    ],
)
def test_nothing_heavy_is_imported(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_help_loads_no_rpc_and_no_redis_client() -> None:
    code = "import sys, trireme.cli.main; print(*(name for name in ('grpc', 'redis') if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_python_m_is_the_same_command() -> None:
    found = subprocess.run([sys.executable, "-m", "trireme", "--help"], capture_output=True, text=True, check=True)
    for command in ("up", "down", "serve", "status", "config", "model"):
        assert f" {command} " in found.stdout
