"""The run directory: one user at a time, by a lock that dies with its holder."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from trireme.launch.rundir import RunDirectory, RunInUse, RunState, write_private

HOLD = """
import sys
from trireme.launch.rundir import RunDirectory
with RunDirectory(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    """Another process that holds the directory."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], text=True, **pipes)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_directory_in_use_is_refused_by_name_and_holder(tmp_path: Path) -> None:
    other = hold(tmp_path)
    with pytest.raises(RunInUse) as caught, RunDirectory(tmp_path):
        pass
    assert str(tmp_path) in str(caught.value) and f"process {other.pid}" in str(caught.value)
    assert RunDirectory(tmp_path).holder() == other.pid
    other.communicate("")
    assert RunDirectory(tmp_path).holder() is None
    with RunDirectory(tmp_path) as mine:
        assert mine.holder() == os.getpid()


def test_the_lock_of_a_killed_holder_is_free(tmp_path: Path) -> None:
    other = hold(tmp_path)
    other.kill()
    other.communicate()
    assert (tmp_path / ".lock").read_text().strip() == str(other.pid)
    assert RunDirectory(tmp_path).holder() is None
    with RunDirectory(tmp_path):
        pass


def test_children_do_not_inherit_the_lock(tmp_path: Path) -> None:
    """A service that outlives its supervisor for a moment must not keep the directory."""
    with RunDirectory(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert RunDirectory(tmp_path).holder() is None
    child.communicate(b"\n")


def test_state_comes_back(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.load_state() is None
    state = RunState("r", "running", "redis://localhost:1/0")
    directory.save_state(state)
    assert directory.load_state() == state
    directory.state_file.write_text("{")
    assert directory.load_state() is None


def test_private_files_are_private_even_over_public_ones(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]
