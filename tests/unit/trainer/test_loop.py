"""The loop over fakes of its parts: what happens in which order, and what a failure, a drain and a restart leave."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import grpc
import pytest
import torch

from services.trainer.assembly import Group
from services.trainer.batch import from_bytes
from services.trainer.checkpoints import CheckpointError
from services.trainer.learning import Learned
from services.trainer.loop import VALIDATION_ATTEMPTS, NonFiniteError
from services.trainer.validation import NoServers
from tests.unit.trainer.builders import batch_of
from tests.unit.trainer.life import NONE, PROMPTLY_S, FakeValidator, Life, stay


class TestOrder:
    async def test_each_step_trains_on_the_newest_weights_and_publishes_its_own(self, tmp_path: Path) -> None:
        life = Life(tmp_path)
        await life.run()
        assert life.events == [
            "publish 1", "servers",
            "collect 1", "admit 1", "learn 1", "publish 2",
            "collect 2", "admit 2", "learn 2", "publish 3",
            "save", "export",
        ]  # fmt: skip
        assert (life.state.step, life.state.weight_version, life.state.phase) == (2, 3, "done")
        assert [(row["step"], row["train/reward"]) for row in life.rows()] == [(1, 1.0), (2, 1.0)]
        assert [row["train/weight_version"] for row in life.rows()] == [2, 3]
        assert [row["step"] for row in life.rows("samples.jsonl")] == [1, 2]
        assert life.checkpoints == ["step_2"] and life.summary["steps"] == 2
        assert life.exported == {"weight": 0.0}

    async def test_validations_and_checkpoints_come_by_their_periods_and_at_the_end(self, tmp_path: Path) -> None:
        periods = ["grpo.val_at_start=true", "grpo.val_period=2", "checkpointing.save_period=2"]
        life = Life(tmp_path, "grpo.max_num_steps=5", *periods)
        life.validator = FakeValidator(life.events, lambda: None)
        await life.run()
        assert [event for event in life.events if "validate" in event] == [
            "validate 1", "validate 3", "validate 5", "validate 6",
        ]  # fmt: skip
        assert [row["step"] for row in life.rows() if "validation/accuracy" in row] == [0, 2, 4, 5]
        assert life.checkpoints == ["step_2", "step_4", "step_5"]
        assert life.summary["heldout_before"] == life.summary["heldout_after"] == 0.75

    async def test_a_checkpoint_is_ranked_by_what_its_own_step_measured(self, tmp_path: Path) -> None:
        """Not by a validation of steps ago: those weights are not in it."""
        life = Life(tmp_path, "grpo.max_num_steps=4", "grpo.val_period=2", "checkpointing.save_period=1")
        life.validator = FakeValidator(life.events, lambda: None)
        await life.run()
        states = [json.loads((tmp_path / "checkpoints" / name / "state.json").read_text()) for name in life.checkpoints]
        assert [state["metrics"].get("validation/accuracy") for state in states] == [None, 0.75, None, 0.75]
        assert all("train/reward" in state["metrics"] for state in states)

    async def test_a_metric_that_nothing_measures_is_reported(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        await Life(tmp_path, "checkpointing.metric_name=train/rewrad").run()
        assert "checkpointing.metric_name was never measured" in caplog.text

    async def test_the_end_of_the_data_is_the_end_of_the_run(self, tmp_path: Path) -> None:
        life = Life(tmp_path, "grpo.max_num_steps=9")
        life.collector.exhausted_from = 3
        await life.run()
        assert life.events[-3:] == ["publish 3", "save", "export"]
        assert life.checkpoints == ["step_2"] and life.summary["steps"] == 2


class TestValidationFailures:
    @pytest.mark.parametrize("kind", ["grpc", "nobody", "late"])
    async def test_cost_the_measurement_and_nothing_else(self, tmp_path: Path, kind: str) -> None:
        troubles: dict[str, Exception] = {
            "grpc": grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, NONE, NONE, "gone", None),
            "nobody": NoServers("0 rollout servers"),
            "late": TimeoutError("no rollout server registered"),
        }
        life = Life(tmp_path, "grpo.val_at_start=true")
        life.validator = FakeValidator(life.events, lambda: troubles[kind])
        await life.run()
        assert life.events.count("validate 1") == life.events.count("validate 3") == VALIDATION_ATTEMPTS
        assert life.events[-2:] == ["save", "export"]
        assert life.checkpoints == ["step_2"] and (tmp_path / "hf").is_dir()
        assert (life.summary["steps"], life.summary["heldout_after"]) == (2, None)
        assert [row["step"] for row in life.rows()] == [1, 2]

    async def test_pass_when_the_servers_are_back(self, tmp_path: Path) -> None:
        life, troubles = Life(tmp_path), [NoServers("a moment ago")]
        life.validator = FakeValidator(life.events, lambda: troubles.pop() if troubles else None)
        await life.run()
        assert life.events[-5:] == ["validate 3", "servers", "validate 3", "save", "export"]
        assert life.summary["heldout_after"] == 0.75


class TestBackgroundSaves:
    async def test_training_goes_on_and_the_end_waits_for_them(self, tmp_path: Path) -> None:
        life, saving = Life(tmp_path, "checkpointing.async_save=true", "checkpointing.save_period=1"), Future[None]()
        life.backend.saves = [saving]
        task = asyncio.create_task(life.run())
        while "publish 3" not in life.events:
            await asyncio.sleep(0.01)
        assert life.events.count("save") == 1 and life.checkpoints == ["unfinished_step_1"]
        saving.set_result(None)
        await asyncio.wait_for(task, PROMPTLY_S)
        assert life.checkpoints == ["step_1", "step_2"] and life.events[-2:] == ["save", "export"]

    async def test_one_that_failed_ends_the_run_at_the_next(self, tmp_path: Path) -> None:
        life, failed = Life(tmp_path, "checkpointing.async_save=true", "checkpointing.save_period=1"), Future[None]()
        failed.set_exception(OSError("no room"))
        life.backend.saves = [failed]
        with pytest.raises(CheckpointError, match="step 1 could not be written.*no room"):
            await life.run()
        assert life.checkpoints == [] and life.events.count("save") == 1

    async def test_one_is_completed_whatever_ends_the_run(self, tmp_path: Path) -> None:
        keys = ["checkpointing.async_save=true", "checkpointing.save_period=1", "trainer.max_nonfinite_steps=1"]
        life, saving = Life(tmp_path, *keys), Future[None]()
        life.backend.saves, life.learner.applied = [saving], [True, False]
        task = asyncio.create_task(life.run())
        while "learn 2" not in life.events:
            await asyncio.sleep(0.01)
        saving.set_result(None)
        with pytest.raises(NonFiniteError):
            await asyncio.wait_for(task, PROMPTLY_S)
        assert life.checkpoints == ["step_1"]


class TestNonFinite:
    async def test_too_many_in_a_row_end_the_run_and_leave_the_batch(self, tmp_path: Path) -> None:
        """A step that was applied starts the count anew; one that had nothing to train on says nothing."""
        life = Life(tmp_path, "grpo.max_num_steps=9", "trainer.max_nonfinite_steps=2")
        life.learner.applied = [False, True, False, None, False]
        path = tmp_path / "nonfinite_step_5.safetensors"
        with pytest.raises(NonFiniteError, match=rf"2 steps in a row.*max_nonfinite_steps.*{re.escape(str(path))}"):
            await life.run()
        assert torch.equal(from_bytes(path.read_bytes()).tokens, batch_of([[True] * 5]).tokens)
        assert [file.name for file in tmp_path.glob("nonfinite*")] == [path.name]
        assert life.events[-1] == "learn 5"  # weights that may be broken are neither published nor saved
        assert life.checkpoints == []


class TestDrain:
    async def test_while_waiting_for_groups(self, tmp_path: Path) -> None:
        """C-01: the wait ends, the finished steps are kept, and nothing is exported as if the run were complete."""
        life = Life(tmp_path, "grpo.max_num_steps=9")
        life.validator = FakeValidator(life.events, lambda: None)
        life.collector.blocked_from = 3
        await life.drained_at(life.collector.waiting)
        assert life.events[-3:] == ["publish 3", "cancelled", "save"]
        assert life.checkpoints == ["step_2"] and not (tmp_path / "hf").exists()
        assert life.summary["steps"] == 2 and life.state.phase == "done"

    async def test_while_the_servers_are_awaited(self, tmp_path: Path) -> None:
        life, reached = Life(tmp_path, "grpo.val_at_start=true"), asyncio.Event()
        life.validator = FakeValidator(life.events, lambda: None)
        life.servers_ready = lambda: stay(reached, life.events)
        await life.drained_at(reached)
        assert life.events == ["publish 1", "cancelled", "save"]
        assert life.checkpoints == ["step_0"] and not (tmp_path / "hf").exists()

    async def test_during_a_validation(self, tmp_path: Path) -> None:
        """A server that never answers does not hold a drain up until its deadline."""
        life, reached = Life(tmp_path, "grpo.val_period=1"), asyncio.Event()
        life.validator = FakeValidator(life.events, lambda: None)
        waits: list[Callable[[], Awaitable[None]]] = [life._ready, lambda: stay(reached, life.events)]
        life.servers_ready = lambda: waits.pop(0)()
        await life.drained_at(reached)
        assert life.events[-3:] == ["publish 2", "cancelled", "save"]
        assert life.checkpoints == ["step_1"] and life.summary["heldout_after"] is None

    async def test_during_a_step_finishes_it(self, tmp_path: Path) -> None:
        """Groups that were taken are trained on and published before the checkpoint."""
        life = Life(tmp_path, "grpo.max_num_steps=9")
        learn = life.learner.learn

        def drained(groups: Sequence[Group], version: int) -> Learned:
            life.state.drain.set()
            return learn(groups, version)

        life.learner.learn = drained  # type: ignore[method-assign]
        await asyncio.wait_for(life.run(), PROMPTLY_S)
        assert life.events[-3:] == ["learn 1", "publish 2", "save"]
        assert life.checkpoints == ["step_1"] and life.summary["steps"] == 1


class TestResume:
    async def killed(self, tmp_path: Path) -> Life:
        """Checkpoint of step 2 at version 3; killed in step 4, when step 3 was recorded and published as version 4."""
        life = Life(tmp_path, "grpo.max_num_steps=5", "checkpointing.save_period=2")
        life.learner.fails_at = 4
        with pytest.raises(RuntimeError, match="killed"):
            await life.run()
        assert [row["step"] for row in life.rows()] == [1, 2, 3]
        assert life.checkpoints == ["step_2"] and life.publisher.version == 4
        return life

    @pytest.mark.parametrize(("known", "first"), [(4, 5), (0, 4)])
    async def test_the_version_never_goes_back(self, tmp_path: Path, known: int, first: int) -> None:
        """Servers hold version 4 and refuse older ones; without a registry that knows, the checkpoint's 3 counts."""
        await self.killed(tmp_path)
        life = Life(tmp_path, "grpo.max_num_steps=5", number=2, published=known)
        await life.run()
        assert life.events == [
            "restore", f"publish {first}", "servers",
            *(f"{what} {version}" for n in range(3) for what, version in (
                ("collect", first + n), ("admit", first + n), ("learn", first + n), ("publish", first + n + 1),
            )),
            "save", "export",
        ]  # fmt: skip
        assert life.collector.restored == ({"taken": 2}, first)

    async def test_another_first_model_is_reported(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        await self.killed(tmp_path)
        await Life(tmp_path, "grpo.max_num_steps=3", "policy.model_name=owner/other", number=2).run()
        assert "the run began with another policy.model_name" in caplog.messages

    async def test_every_step_has_its_rows_once(self, tmp_path: Path) -> None:
        """C-02: step 3 of the first life, which no checkpoint holds, is taken and recorded again."""
        await self.killed(tmp_path)
        life = Life(tmp_path, "grpo.max_num_steps=5", number=2, published=4)
        await life.run()
        rows = [(row["step"], row["train/reward"]) for row in life.rows()]
        assert rows == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
        assert [row["step"] for row in life.rows("samples.jsonl")] == [1, 2, 3, 4, 5]
        assert life.summary["steps"] == 5
        assert life.summary["reward_first5"] == pytest.approx(8 / 5)
        assert life.exported == {"weight": 1.0}

    async def test_a_finished_run_trains_no_more(self, tmp_path: Path) -> None:
        await Life(tmp_path).run()
        (tmp_path / "hf").rmdir()
        life = Life(tmp_path, number=2, published=3)
        await life.run()
        assert life.events == ["restore", "publish 4", "servers", "export"]
        assert [row["step"] for row in life.rows()] == [1, 2]

    async def test_without_checkpointing_nothing_is_taken_up(self, tmp_path: Path) -> None:
        await Life(tmp_path).run()
        (tmp_path / "hf").rmdir()
        life = Life(tmp_path, "checkpointing.enabled=false", number=2, published=3)
        await life.run()
        assert "restore" not in life.events and "save" not in life.events
        assert life.events[-1] == "export" and life.publisher.version == 6
