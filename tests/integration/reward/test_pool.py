"""The pool with real processes and a verifier that misbehaves in them."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from services.reward.pool import Judged, PoolSettings, VerifierPool
from trireme.contracts.v1 import reward_pb2, sample_pb2

pytestmark = pytest.mark.asyncio
MISBEHAVING = "tests.integration.reward.misbehaving:Misbehaving"
SETTINGS = PoolSettings(workers=2, timeout_s=4.0, max_attempts=2, memory_mib=512, verifiers=(MISBEHAVING,))


def request(act: str, **payload: object) -> reward_pb2.ScoreRequest:
    task = sample_pb2.Task(verifier="misbehaving", payload_json=json.dumps(payload))
    return reward_pb2.ScoreRequest(id=act, response_text=act, task=task)


def scoring_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # one that was just killed
            if "services.reward.scoring_process" in " ".join(process.cmdline()):
                found.append(process)
    return found


FAILURES = {
    "exit": ("crash", "exit code 3"),
    "fork": ("crash", "exit code 4"),
    "segfault": ("crash", "SIGSEGV"),
    "hang": ("timeout", "timed out after 4 s"),
    "memory": ("memory", "out of memory"),
    "raise": ("exception", "RuntimeError: out of sorts"),
    "interrupt": ("exception", "KeyboardInterrupt"),
    "none": ("invalid", "returned None"),
    "number": ("invalid", "returned a float"),
    "nan": ("invalid", "value that is not finite"),
    "infinite": ("invalid", "part that is not finite"),
    "text": ("invalid", "not a number"),
}


async def test_failures_are_failures_in_the_order_of_the_requests() -> None:
    """R-22, R-24, R-28, Q-11: each misdeed gives a failure with its reason after all attempts, never a 0; one result
    for each request, in their order; those that behave are scored beside them."""
    acts = [act for failure in FAILURES for act in (failure, "score")]
    async with VerifierPool(SETTINGS) as pool:
        results = await pool.score_all([request(act) for act in acts])
        assert len(results) == len(acts)
        for act, result in zip(acts, results, strict=True):
            if act == "score":
                assert (result.report.kind, result.report.value, result.attempts) == ("score", 1.0, 1)
                assert result.report.components == {"part": 0.25}
            else:
                check_failure(act, result)
        zero, policy, noisy = await pool.score_all([request("zero"), request("policy"), request("print")])
        assert (zero.report.kind, zero.report.value) == ("score", 0.0)
        assert (policy.report.kind, policy.report.reason) == ("policy_failure", "forbidden word")
        assert noisy.report.value == 1.0
        assert len(scoring_processes()) <= SETTINGS.workers
    assert scoring_processes() == []


def check_failure(act: str, result: Judged) -> None:
    cause, reason = FAILURES[act]
    assert result.report.kind == "infrastructure_failure", act
    assert (result.report.cause, result.attempts) == (cause, SETTINGS.max_attempts), act
    assert reason in result.report.reason, act


@pytest.mark.parametrize("act", ["exit", "raise", "hang"])
async def test_what_fails_once_is_tried_again(act: str, tmp_path: Path) -> None:
    """R-28: a passing fault costs an attempt, not the sample."""
    async with VerifierPool(SETTINGS) as pool:
        result = await pool.score(request(act, once=str(tmp_path / "happened")))
        assert (result.report.kind, result.report.value, result.attempts) == ("score", 0.5, 2)


async def test_the_limit_is_on_scoring_not_on_waiting() -> None:
    """Requests that wait for a process, and the start of one, use up nobody's time."""
    settings = PoolSettings(workers=1, timeout_s=4, max_attempts=1, verifiers=(MISBEHAVING,))
    async with VerifierPool(settings) as pool:
        results = await pool.score_all([request("score", seconds=1) for _ in range(6)])
        assert [r.report.kind for r in results] == ["score"] * 6


async def test_a_cancelled_request_frees_its_process_and_answers_nobody_else() -> None:
    """Q-11: a caller's deadline stops the scoring; the next request gets its own answer."""
    settings = PoolSettings(workers=1, timeout_s=2000, verifiers=(MISBEHAVING,))
    async with VerifierPool(settings) as pool:
        await pool.score(request("score"))
        [before] = scoring_processes()
        slow = asyncio.create_task(pool.score(request("score", seconds=1000)))
        await asyncio.sleep(0.3)
        slow.cancel()
        result = await pool.score(request("zero"))
        assert result.report.value == 0.0
        assert not before.is_running()
        with pytest.raises(asyncio.CancelledError):
            await slow


async def test_processes_are_replaced_now_and_then() -> None:
    settings = PoolSettings(workers=1, tasks_per_process=2, verifiers=(MISBEHAVING,))
    async with VerifierPool(settings) as pool:
        pids = []
        for _ in range(4):
            await pool.score(request("score"))
            pids.append(next((p.pid for p in scoring_processes() if p.status() != psutil.STATUS_ZOMBIE), 0))
        assert len(set(pids)) >= 2
        assert pids[0] != pids[2]


async def test_a_verifier_that_cannot_load_is_a_failure_with_the_reason() -> None:
    settings = PoolSettings(workers=1, max_attempts=2, verifiers=("tests.integration.reward.misbehaving:NoLibrary",))
    async with VerifierPool(settings) as pool:
        broken = request("score")
        broken.task.verifier = "no_library"
        result = await pool.score(broken)
        assert (result.report.kind, result.report.cause) == ("infrastructure_failure", "load")
        assert "no_such_library" in result.report.reason


async def test_the_address_of_redis_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIREME_REDIS_URL", "redis://:secret@host")
    async with VerifierPool(SETTINGS) as pool:
        assert (await pool.score(request("redis"))).report.value == 0.0
