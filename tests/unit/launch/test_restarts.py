"""When to start a dead service again."""

from __future__ import annotations

from trireme.launch.restarts import RestartPolicy, Restarts

POLICY = RestartPolicy(limit=4, first_s=1.0, factor=2.0, longest_s=5.0, settled_s=300.0)


def test_delays_grow_to_a_limit_and_then_it_is_given_up() -> None:
    restarts = Restarts(POLICY)
    assert [restarts.next_delay_s(lived_s=1.0) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, None]
    assert restarts.total == 4


def test_a_long_life_wipes_the_slate() -> None:
    restarts = Restarts(POLICY)
    for _ in range(4):
        restarts.next_delay_s(lived_s=1.0)
    assert restarts.next_delay_s(lived_s=300.0) == 1.0
    assert restarts.total == 5
