"""`trireme up` from outside: order, exit codes, restarts, stopping, and that nothing stays."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.cli.conftest import Bench
from trireme.launch.interrupts import TOGETHER_S
from trireme.launch.rundir import RunDirectory


def test_a_whole_run(bench: Bench) -> None:
    """Start and stop in order, replicas with logs of their own, a report, and files that hold a password private."""
    code, output = bench.finish(bench.up("rollout.replicas=2"))
    assert code == 0, output
    events = bench.events()
    assert set(events[:4]) == {"start reward-0", "start rollout-0", "start rollout-1", "start trainer"}
    assert events[4:6] == ["checkpoint 3", "stop trainer"]
    assert set(events[6:8]) == {"stop rollout-0", "stop rollout-1"}
    assert events[8:] == ["stop reward-0"]
    starts = [line.split()[1] for line in output.splitlines() if line.endswith("starting")]
    assert starts == ["reward-0", "rollout-0", "rollout-1", "trainer"]
    assert "step 3  reward 0.300" in output
    assert f"model (Hugging Face folder): {bench.run_dir / 'hf'}" in output
    assert "rollout-1 says hello" in (bench.run_dir / "logs/rollout-1.log").read_text()
    for name in ("config.yaml", "run.json"):
        assert stat.S_IMODE((bench.run_dir / name).stat().st_mode) == 0o600
    assert bench.alive() == set()


def test_exits_with_the_trainers_code(bench: Bench) -> None:
    code, output = bench.finish(bench.up(FAKE_EXIT="3"))
    assert code == 3
    assert "trainer ended with code 3" in output
    assert RunDirectory(bench.run_dir).load_state().exit_code == 3


def test_bad_data_is_refused_before_anything_starts(bench: Bench) -> None:
    code, output = bench.finish(bench.up(FAKE_DATA="prompts.jsonl, row 3: is not JSON"))
    assert code == 2
    assert "prompts.jsonl, row 3: is not JSON" in output and "Traceback" not in output
    assert bench.events() == [] and not bench.run_dir.exists()


def test_the_redis_password_is_in_no_command_line(bench: Bench) -> None:
    process = bench.up(FAKE_STEP_S="30")
    bench.wait(lambda: "start trainer" in bench.events())
    url = RunDirectory(bench.run_dir).load_state().redis_url
    password = re.search(r":([^:@]+)@", url).group(1)
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert password not in lines
    _end(bench, process)


def test_a_service_that_never_becomes_healthy(bench: Bench) -> None:
    """A rollout server that never becomes healthy is named, with its log and what it last said."""
    code, output = bench.finish(bench.up("rollout.startup_timeout_s=20.0", FAKE_ROLLOUT_0="silent"))
    assert code == 1
    assert "rollout-0 did not become healthy within 20 s" in output
    assert str(bench.run_dir / "logs/rollout-0.log") in output
    assert "rollout-0 says hello" in output
    assert bench.alive() == set()


def test_a_service_that_ends_while_starting_is_reported_at_once(bench: Bench) -> None:
    code, output = bench.finish(bench.up(FAKE_ROLLOUT_0="exit:4"))  # the start-up timeout is 600 s
    assert code == 1
    assert "rollout-0 ended with code 4 while starting" in output
    assert "this is the last line" in output


def test_a_killed_replica_is_started_again_and_the_run_goes_on(bench: Bench) -> None:
    """Q-12: kill -9 of a rollout and of a reward server in the middle of a run."""
    process = bench.up("grpo.max_num_steps=100000")
    bench.wait(lambda: _state(bench) == "running")
    for kind in ("rollout", "reward"):
        os.kill(bench.service(kind), signal.SIGKILL)
        bench.wait(lambda kind=kind: bench.events().count(f"start {kind}-0") == 2)
    bench.finish(bench.trireme("down", str(bench.run_dir)))
    code, output = bench.finish(process)
    assert code == 0, output
    assert "rollout-0 restarting  ended with code 137" in output
    assert "reward-0 restarting  ended with code 137" in output


def test_the_trainers_death_ends_the_run(bench: Bench) -> None:
    """Q-12: kill -9 of the trainer; nobody may train on without its optimizer."""
    process = bench.up("grpo.max_num_steps=100000")
    bench.wait(lambda: _state(bench) == "running")
    os.kill(bench.service("trainer"), signal.SIGKILL)
    code, output = bench.finish(process)
    assert code == 137
    assert "trainer ended with code 137" in output
    assert bench.events()[-2:] == ["stop rollout-0", "stop reward-0"]


def test_killing_the_supervisor_leaves_nothing(bench: Bench) -> None:
    """kill -9 of `up`: services, their descendants in sessions of their own, and Redis all go."""
    process = bench.up(FAKE_STEP_S="30")
    everything = 1 + 3 * 3  # up; guardian, service and descendant of each
    bench.wait(lambda: len(bench.alive()) == everything)
    redis = bench.redis_pid()
    process.kill()
    bench.wait(lambda: bench.alive() == set())
    bench.wait(lambda: not Path(f"/proc/{redis}").exists())


def test_killing_the_supervisor_leaves_nothing_of_services_that_ignore_signals(bench: Bench) -> None:
    process = bench.up(FAKE_STEP_S="30", FAKE_ROLLOUT_0="refuse")
    bench.wait(lambda: "start trainer" in bench.events())
    process.kill()
    bench.wait(lambda: bench.alive() == set())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_the_trainer(bench: Bench, number: signal.Signals) -> None:
    process = bench.up("grpo.max_num_steps=1000", FAKE_STEP_S="0.3")
    bench.wait(lambda: _state(bench) == "running")
    process.send_signal(number)
    code, output = bench.finish(process)
    assert code == 0, output
    assert "finish its step and checkpoint" in output
    events = [event.split()[0] + " " + event.split()[1] for event in bench.events()[3:]]
    assert events[0].startswith("checkpoint")
    assert events[1:] == ["stop trainer", "stop rollout-0", "stop reward-0"]


def test_a_second_signal_kills(bench: Bench) -> None:
    process = bench.up("grpo.max_num_steps=1000", FAKE_STEP_S="60", FAKE_ROLLOUT_0="refuse")
    bench.wait(lambda: "start trainer" in bench.events() and _state(bench) == "running")
    process.send_signal(signal.SIGINT)
    bench.wait(lambda: _state(bench) == "stopping")
    process.send_signal(signal.SIGINT)  # by a wrapper that passes the first one on: not meant as a second
    time.sleep(TOGETHER_S + 0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, output = bench.finish(process)
    assert code != 0, output
    assert bench.alive() == set()


def test_a_signal_while_starting_stops_what_was_started(bench: Bench) -> None:
    process = bench.up("grpo.max_num_steps=1000", FAKE_ROLLOUT_0="silent")
    started = {"start reward-0", "start rollout-0", "start trainer"}
    bench.wait(lambda: started <= set(bench.events()))
    process.send_signal(signal.SIGINT)
    code, output = bench.finish(process)
    assert code == 130, output
    assert "stop reward-0" in bench.events() and "stop rollout-0" in bench.events()


def test_a_second_up_on_the_same_directory_is_refused_by_name(bench: Bench) -> None:
    first = bench.up(FAKE_STEP_S="30")
    bench.wait(lambda: "start trainer" in bench.events())
    code, output = bench.finish(bench.up())
    assert code == 2
    assert str(bench.run_dir) in output and f"process {first.pid}" in output
    _end(bench, first)


def test_a_stale_lock_is_harmless(bench: Bench) -> None:
    bench.run_dir.mkdir()
    (bench.run_dir / ".lock").write_text(f"{os.getpid()}\n")
    code, output = bench.finish(bench.up())
    assert code == 0, output


def test_a_taken_port_is_named_before_anything_starts(bench: Bench, free_port: int) -> None:
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", free_port))
        holder.listen(1)
        code, output = bench.finish(bench.up(f"rollout.port={free_port}"))
    assert code == 2
    assert f"rollout.port: cannot listen on 127.0.0.1:{free_port}" in output
    assert bench.events() == []


def test_the_given_redis_is_used_and_kept(bench: Bench, redis_url: str) -> None:
    code, output = bench.finish(bench.up(f"redis.url={redis_url}"))
    assert code == 0, output
    assert RunDirectory(bench.run_dir).load_state().redis_url == redis_url
    assert not (bench.run_dir / "redis").exists()


def test_an_unreachable_redis_is_refused(bench: Bench, free_port: int) -> None:
    url = f"redis://127.0.0.1:{free_port}/0"
    code, output = bench.finish(bench.up(f"redis.url={url}", "redis.connect_timeout_s=1.0"))
    assert code == 2
    assert f"127.0.0.1:{free_port}" in output and "Traceback" not in output
    assert bench.events() == []


def test_detach_returns_when_healthy_and_down_stops_it(bench: Bench) -> None:
    code, output = bench.finish(bench.trireme("up", str(bench.config), "grpo.max_num_steps=1000", "--detach"))
    assert code == 0, output
    assert f"trireme down {bench.run_dir}" in output
    assert "start trainer" in bench.events()
    status = json.loads(bench.finish(bench.trireme("status", str(bench.run_dir), "--json"))[1])
    assert status["state"] == "running"
    assert [service["name"] for service in status["services"]] == ["reward-0", "rollout-0", "trainer"]
    code, output = bench.finish(bench.trireme("down", str(bench.run_dir)))
    assert code == 0 and "stopped" in output
    assert bench.events()[-2:] == ["stop rollout-0", "stop reward-0"]
    assert bench.alive() == set()


def test_detach_reports_a_failing_start(bench: Bench) -> None:
    code, output = bench.finish(bench.trireme("up", str(bench.config), "--detach", FAKE_ROLLOUT_0="exit:4"))
    assert code == 1
    assert "rollout-0 ended with code 4 while starting" in output


def test_a_service_can_join_a_run_by_serve(bench: Bench) -> None:
    """A late joiner needs no address: it finds the Redis of the run that goes on in run.dir."""
    up = bench.up(FAKE_STEP_S="30")
    bench.wait(lambda: _state(bench) == "running")
    joined = bench.trireme("serve", "rollout", "--config", str(bench.config), "--name", "rollout-9")
    bench.wait(lambda: "start rollout-9" in bench.events())

    def found() -> bool:
        report = json.loads(bench.finish(bench.trireme("status", str(bench.run_dir), "--json"))[1])
        return "rollout-9" in [service["name"] for service in report["services"]]

    bench.wait(found)
    for pid in (joined.pid, *_children(joined.pid)):  # its descendant is its own affair: no guardian here
        os.kill(pid, signal.SIGTERM)
    assert bench.finish(joined)[0] == 0
    _end(bench, up)


def _children(pid: int) -> list[int]:
    from trireme.launch.guard import descendants

    return sorted(descendants(pid))


def _state(bench: Bench) -> str:
    state = RunDirectory(bench.run_dir).load_state()
    return state.state if state else ""


def _end(bench: Bench, process: subprocess.Popen[str]) -> None:
    """Two signals: end at once."""
    process.send_signal(signal.SIGINT)
    bench.wait(lambda: _state(bench) == "stopping")
    process.send_signal(signal.SIGINT)
    bench.finish(process)
