"""Checkpoints on disk: atomic, pruned, and refused by name when damaged."""

from __future__ import annotations

import errno
import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from services.trainer.checkpoints import CheckpointError, Checkpoints
from tests.unit.trainer.builders import ended


def write_policy(folder: Path) -> Future[None]:
    (folder / "weights").write_text("weights")
    return ended()


def make(tmp_path: Path, **options: object) -> Checkpoints:
    settings = {"keep_top_k": None, "metric_name": None, "higher_is_better": True} | options
    return Checkpoints(tmp_path / "checkpoints", **settings)  # type: ignore[arg-type]


def steps(checkpoints: Checkpoints) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints.all()]


def test_latest_is_the_highest_step_not_the_last_name(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    for step in (2, 10, 9):
        checkpoints.save(step, {"step": step}, write_policy)()
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest.step, latest.state()["step"], (latest.policy / "weights").read_text()) == (10, 10, "weights")


def test_nothing_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert make(tmp_path).latest() is None


def test_keeps_the_best_and_the_newest(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, keep_top_k=2, metric_name="validation/accuracy")
    for step, accuracy in ((1, 0.9), (2, 0.5), (3, 0.1)):
        checkpoints.save(step, {"metrics": {"validation/accuracy": accuracy}}, write_policy)()
    assert steps(checkpoints) == [1, 3]


def test_lower_can_be_better(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, keep_top_k=2, metric_name="loss", higher_is_better=False)
    for step, loss in ((1, 0.9), (2, 0.5), (3, 0.7)):
        checkpoints.save(step, {"metrics": {"loss": loss}}, write_policy)()
    assert steps(checkpoints) == [2, 3]


def test_without_a_metric_the_newest_stay(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, keep_top_k=2)
    for step in (1, 2, 3):
        checkpoints.save(step, {}, write_policy)()
    assert steps(checkpoints) == [2, 3]


def test_an_unreadable_older_checkpoint_and_a_missing_score_do_not_fail_a_save(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, keep_top_k=2, metric_name="m")
    for step, value in ((1, 0.5), (2, float("nan")), (3, 0.1)):
        checkpoints.save(step, {"metrics": {"m": value}}, write_policy)()
    (checkpoints.directory / "step_1" / "state.json").write_text("{")
    checkpoints.save(4, {"metrics": {"m": 0.2}}, write_policy)()
    assert 4 in steps(checkpoints)


@pytest.mark.parametrize("later", [False, True], ids=["at once", "in the background"])
def test_full_disk_leaves_the_old_checkpoint(tmp_path: Path, later: bool) -> None:
    """C-07: a save that fails deletes nothing, and the error says what is left."""
    checkpoints = make(tmp_path, keep_top_k=1)
    checkpoints.save(1, {}, write_policy)()

    def full(folder: Path) -> Future[None]:
        write_policy(folder)
        error = OSError(errno.ENOSPC, "No space left on device")
        if not later:
            raise error
        future = Future[None]()
        future.set_exception(error)
        return future

    with pytest.raises(CheckpointError, match=r"step 2 .*No space left on device.*MiB free.*intact"):
        checkpoints.save(2, {}, full)()
    assert steps(checkpoints) == [1]
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["step_1"]


def test_a_checkpoint_appears_when_the_policy_is_written_and_not_before(tmp_path: Path) -> None:
    """C-07 in the background; the state is that of the beginning."""
    checkpoints, state, future = make(tmp_path), {"step": 1}, Future[None]()
    complete = checkpoints.save(1, state, lambda _: future)
    state["step"] = 2
    assert checkpoints.latest() is None
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(complete)
        assert not waiting.done() and checkpoints.latest() is None
        future.set_result(None)
        saved = waiting.result()
    assert checkpoints.latest() == saved and saved.state() == {"step": 1}


def test_unfinished_folder_of_a_killed_save_is_no_checkpoint(tmp_path: Path) -> None:
    """C-07: a kill during a save leaves a folder that is never loaded, and that the next save removes."""
    checkpoints = make(tmp_path)
    checkpoints.save(1, {}, write_policy)()
    (checkpoints.directory / "unfinished_step_2" / "policy").mkdir(parents=True)
    latest = checkpoints.latest()
    assert latest is not None and latest.step == 1
    checkpoints.save(3, {}, write_policy)()
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["step_1", "step_3"]


def test_a_kill_while_an_old_one_is_removed_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-07's kind: what is left of a checkpoint must not be taken for one."""
    checkpoints = make(tmp_path, keep_top_k=1)
    checkpoints.save(1, {}, write_policy)()

    def killed(folder: Path) -> None:
        (folder / "state.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("services.trainer.checkpoints.shutil.rmtree", killed)
        checkpoints.save(2, {}, write_policy)()
    assert steps(checkpoints) == [2]
    checkpoints.save(3, {}, write_policy)()
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step_3"]


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    checkpoints.save(1, {"life": 1}, write_policy)()
    checkpoints.save(1, {"life": 2}, write_policy)()
    latest = checkpoints.latest()
    assert latest is not None and latest.state() == {"life": 2}


@pytest.mark.parametrize("content", [None, "", '{"step": ', "[1]", '{"step": 2}', '{"checksum": "0", "step": 1}'])
def test_damaged_state_is_named(tmp_path: Path, content: str | None) -> None:
    checkpoints = make(tmp_path)
    saved = checkpoints.save(1, {"step": 1}, write_policy)()
    state = saved.path / "state.json"
    state.unlink() if content is None else state.write_text(content)
    with pytest.raises(CheckpointError, match=r"step_1/state\.json"):
        saved.state()


def test_state_is_json_with_a_checksum(tmp_path: Path) -> None:
    """C-07's kind: a number that has changed is still JSON."""
    state = {"a": [1.5, "b", float("inf")], "step": 1, "weights": 7}
    saved = make(tmp_path).save(1, state, write_policy)()
    file = saved.path / "state.json"
    assert saved.state() == state
    assert json.loads(file.read_text()).items() >= state.items()
    file.write_text(file.read_text().replace('"weights": 7', '"weights": 3'))
    with pytest.raises(CheckpointError, match=r"step_1/state\.json .*checksum"):
        saved.state()


def test_the_state_of_an_older_version_has_no_checksum(tmp_path: Path) -> None:
    saved = make(tmp_path).save(1, {}, write_policy)()
    (saved.path / "state.json").write_text('{"step": 1}')
    assert saved.state() == {"step": 1}


def test_what_cannot_be_removed_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = make(tmp_path, keep_top_k=1)
    checkpoints.save(1, {}, write_policy)()

    def busy(folder: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr("services.trainer.checkpoints.shutil.rmtree", busy)
        checkpoints.save(2, {}, write_policy)()
        checkpoints.save(3, {}, write_policy)()
    assert steps(checkpoints) == [3]
    checkpoints.save(4, {}, write_policy)()
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step_4"]
