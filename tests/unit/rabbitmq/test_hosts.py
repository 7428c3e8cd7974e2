"""Which host is tried next, and when it is time to give up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import ConnectionParameters

from airflow_delayed.rabbitmq.hosts import Turns, host_name


def hosts(number: int) -> list[ConnectionParameters]:
    return [ConnectionParameters(host=f"rabbit{index}") for index in range(number)]


@pytest.mark.parametrize("host, name", [("rabbit1", "rabbit1:5672"), ("::1", "[::1]:5672")])
def test_a_host_is_named_with_its_port(host: str, name: str) -> None:
    assert host_name(ConnectionParameters(host=host)) == name


@given(st.integers(1, 5), st.lists(st.floats(0.1, 9), max_size=4))
def test_each_host_gets_its_turn_in_each_round_and_only_rounds_are_waited_for(number: int, waits: list[float]) -> None:
    turns = Turns(hosts(number), waits)
    tried, waited = [], []
    while True:
        tried.append(turns.host.host)
        turns.failed("gone", opened=False)
        wait = turns.wait()
        if wait is None:
            break
        waited.append(wait)
    assert tried == [f"rabbit{index}" for index in range(number)] * (len(waits) + 1)
    assert [wait for wait in waited if wait] == waits
    assert turns.tries == len(tried) - 1
    assert str(turns) == "; ".join(f"rabbit{index}:5672: gone" for index in range(number))


def test_a_success_starts_the_waits_over_and_not_the_turns() -> None:
    turns = Turns(hosts(2), [1, 2])
    for _ in range(3):
        turns.failed("gone", opened=False)
    turns.succeeded()
    turns.failed("cut", opened=True)
    assert (turns.host.host, turns.wait(), turns.tries) == ("rabbit0", 0, 0)
    turns.failed("gone", opened=False)
    assert (turns.host.host, turns.wait(), turns.tries) == ("rabbit1", 1, 1)
    assert str(turns) == "rabbit1:5672: cut; rabbit0:5672: gone"


def test_all_are_shut_only_if_not_one_of_a_round_opened() -> None:
    turns = Turns(hosts(2), [1, 2])
    found = []
    for opened in (False, True, False, False):
        turns.failed("gone", opened=opened)
        found.append(turns.all_shut)
    assert found == [False, False, False, True]
