"""Verifiers by name, and what is said about those that cannot be loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.reward.verifiers.registry import Registry, VerifierError, load

ROOT = Path(__file__).parents[3]
BROKEN = "tests.unit.reward.broken"


def test_the_built_in_ones() -> None:
    assert Registry().names() == ["exact", "math", "reasoning_gym"]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(VerifierError, match='"exakt"; known: exact, math, reasoning_gym'):
        Registry().get("exakt")


def test_a_users_verifier_joins_them() -> None:
    registry = Registry(["tests.integration.reward.misbehaving:Misbehaving"])
    assert registry.get("misbehaving").version == "7"
    assert "exact" in registry.names()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("module_only", '"package.module:Class"'),
        (":Class", '"package.module:Class"'),
        ("no.such.module:Class", 'cannot import "no.such.module".*ModuleNotFoundError'),
        (f"{BROKEN}:Missing", 'has no "Missing"'),
        (f"{BROKEN}:NOT_A_CLASS", "is not a class"),
        (f"{BROKEN}:NoVersion", "lacks version"),
        (f"{BROKEN}:OtherSchema", "schema should be a pydantic model"),
        (f"{BROKEN}:NeedsArguments", "cannot be made without arguments.*path"),
    ],
)
def test_a_bad_path_is_explained(path: str, message: str) -> None:
    with pytest.raises(VerifierError, match=message) as error:
        load(path)
    assert str(error.value).startswith("reward.verifiers: ")
    assert path in str(error.value)


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(VerifierError, match='"exact", a name already taken'):
        Registry([f"{BROKEN}:Taken"])


def test_the_service_imports_neither_torch_nor_vllm() -> None:
    """Nor does a scoring process that has loaded every built-in verifier."""
    code = """
import sys
import services.reward.__main__, services.reward.scoring_process
from services.reward.verifiers.registry import Registry
for verifier in Registry():
    getattr(verifier, "load", lambda: None)()
heavy = {"torch", "vllm", "transformers", "megatron"} & set(sys.modules)
assert not heavy, heavy
assert not [name for name in sys.modules if name.startswith(("services.trainer", "services.rollout"))]
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def test_a_module_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the README shows it; Python itself is told not to look there, for a folder `services` may stand beside it."""
    (tmp_path / "my_rewards.py").write_text("from tests.integration.reward.misbehaving import Misbehaving as Mine\n")
    (tmp_path / "services").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert load("my_rewards:Mine").name == "misbehaving"
    assert sys.path[-1] == str(tmp_path)
