"""Dividing cores and GPUs: what may run at the same time never gets more than there is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.launch.resources import (
    available_cores,
    available_gpus,
    divide_cores,
    divide_gpus,
    split,
)


def test_services_that_take_turns_may_each_use_all_cores() -> None:
    found = divide_cores([0, 1], replicas=1, ranks=1, take_turns=True)
    assert found.rollout == ((0, 1),)
    assert found.trainer_threads == 2


def test_services_that_run_at_the_same_time_share() -> None:
    found = divide_cores(range(8), replicas=2, ranks=2, take_turns=False)
    assert found.rollout == ((0, 1), (2, 3))
    assert found.trainer_threads == 2


def test_one_core_serves_everybody() -> None:
    found = divide_cores([5], replicas=3, ranks=2, take_turns=False)
    assert found.rollout == ((5,), (5,), (5,))
    assert found.trainer_threads == 1


@settings(deadline=None)  # a busy machine is no failure
@given(cores=st.integers(2, 64), replicas=st.integers(1, 8), ranks=st.integers(1, 8))
def test_at_the_same_time_no_more_threads_than_cores(cores: int, replicas: int, ranks: int) -> None:
    """Unless there are more processes than cores: each needs one thread."""
    found = divide_cores(range(cores), replicas, ranks, take_turns=False)
    threads = sum(len(share) for share in found.rollout) + ranks * found.trainer_threads
    assert threads <= max(cores, replicas + ranks, replicas + cores // 2, ranks + (cores + 1) // 2)
    assert all(found.rollout) and found.trainer_threads >= 1


@settings(deadline=None)  # a busy machine is no failure
@given(items=st.integers(1, 64), parts=st.integers(1, 64))
def test_shares_are_equal_and_disjoint_while_there_is_enough(items: int, parts: int) -> None:
    shares = split(range(items), parts)
    assert len(shares) == parts and len({len(share) for share in shares}) == 1
    if items >= parts:
        flat = [item for share in shares for item in share]
        assert len(flat) == len(set(flat))


def test_gpus_are_divided_while_there_are_enough_and_shared_otherwise() -> None:
    found = divide_gpus("01234567", replicas=2, gpus_per_replica=2, ranks=4)
    assert found is not None
    assert found.trainer == ("0", "1", "2", "3")
    assert found.rollout == (("4", "5"), ("6", "7"))
    assert divide_gpus("0", replicas=1, gpus_per_replica=1, ranks=1) is None
    assert divide_gpus("", replicas=1, gpus_per_replica=1, ranks=1) is None


def test_a_thread_limit_in_the_environment_is_kept() -> None:
    assert len(available_cores({"OMP_NUM_THREADS": "1"})) == 1
    everything = available_cores({})
    assert available_cores({"OMP_NUM_THREADS": "9999"}) == everything
    assert available_cores({"OMP_NUM_THREADS": "nonsense"}) == everything


@pytest.mark.parametrize(("visible", "found"), [("2,0", ("2", "0")), ("", ()), ("-1", ()), ("GPU-abc", ("GPU-abc",))])
def test_visible_gpus_keep_their_names_and_order(visible: str, found: tuple[str, ...]) -> None:
    assert available_gpus({"CUDA_VISIBLE_DEVICES": visible}) == found


def test_gpus_are_found_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia0", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert available_gpus({}, tmp_path) == ("0", "2", "10")
