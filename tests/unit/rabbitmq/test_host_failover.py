"""Which host is tried next, and when it is time to give up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pika import ConnectionParameters

from airflow_delayed.rabbitmq.connection import HostFailover, in_turn


def hosts(number: int, name: str = "rabbit") -> list[ConnectionParameters]:
    """Hosts of a name that no other test uses: which of them is tried first is remembered in the process."""
    return [ConnectionParameters(host=f"{name}{index}") for index in range(number)]


@given(st.integers(1, 5), st.lists(st.floats(0.1, 9), max_size=4))
def test_each_host_gets_its_turn_in_each_round_and_only_rounds_are_waited_for(number: int, waits: list[float]) -> None:
    turns = HostFailover(hosts(number), waits)
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
    turns = HostFailover(hosts(2, "success"), [1, 2])
    for _ in range(3):
        turns.failed("gone", opened=False)
    turns.succeeded()
    turns.failed("cut", opened=True)
    assert (turns.host.host, turns.wait(), turns.tries) == ("success0", 0, 0)
    turns.failed("gone", opened=False)
    assert (turns.host.host, turns.wait(), turns.tries) == ("success1", 1, 1)
    assert str(turns) == "success1:5672: cut; success0:5672: gone"


def test_the_host_behind_one_that_failed_is_the_first_of_the_next_send_too() -> None:
    cluster = hosts(3, "cluster")
    HostFailover(cluster, []).failed("frozen", opened=False)
    assert [host.host for host in in_turn(hosts(3, "cluster"))] == ["cluster1", "cluster2", "cluster0"]
    again = HostFailover(cluster, [])
    assert again.host.host == "cluster1"
    again.failed("cut", opened=True)
    # the host that froze is the last one to be tried, and other lists of hosts are none of its business
    assert [host.host for host in in_turn(cluster)] == ["cluster2", "cluster0", "cluster1"]
    assert [host.host for host in in_turn(cluster[:2])] == ["cluster0", "cluster1"]
