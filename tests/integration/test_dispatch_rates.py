"""Fair turns between destinations, and the rate of a process."""

from __future__ import annotations

from datetime import timedelta

import pytest
from support.sleeping import Time
from support.stores import Store, Transport, message, on_postgres_too

SECOND = timedelta(seconds=1)
on_sqlite = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


def sends(hook, start, **counts: int) -> None:
    """Store messages that are due, so many for each destination, in this order of due time."""
    for place, (destination, count) in enumerate(counts.items()):
        due = start - timedelta(minutes=len(counts) - place)
        hook.send(message(f"{destination}{n}", due + n * SECOND / 1000, destination=destination) for n in range(count))


def test_what_is_due_for_few_does_not_wait_for_a_backlog_of_another(store: Store):
    hook, transport = store.installed(), Transport()
    time = Time(hook)
    sends(hook, time.start, bulk=5000, few=10, also=5)
    report = store.dispatcher(hook, transport, **time.options(), batch_size=100).run()
    assert report.dispatched == 5015
    order = [one.destination for one in transport.sent]
    last = max(place for place, destination in enumerate(order) if destination != "bulk")
    # with the second claim; one may be of ten batches
    assert last < 2500
    # each destination in the order of due time
    assert transport.ids.index("few0") < transport.ids.index("few9")
    bulk = [int(one.message_id.removeprefix("bulk")) for one in transport.sent if one.destination == "bulk"]
    assert bulk == sorted(bulk)


@on_postgres_too
@pytest.mark.timeout(120, func_only=True)
def test_a_round_ends_that_locks_the_messages_of_another_turn_again(store: Store):
    """The turn of all destinations meets late messages that the turn of their own destination has locked."""
    hook = store.installed("first", "second", deliver_conn_id=None)
    time = Time(hook)
    sends(hook, time.start, first=15, second=3)
    assert store.dispatcher(hook, **time.options(), batch_size=10).run().dispatched == 18
    assert (len(store.rows(hook, "first")), len(store.rows(hook, "second"))) == (15, 3)


@on_sqlite
def test_a_very_low_rate_of_a_task_does_not_stop_the_looks_at_the_database(store: Store):
    """/ready and /live of a service go by these looks."""
    hook = store.installed()
    time, transport = Time(hook), Transport()
    sends(hook, time.start, sms=3)
    # the test's time passes while the first is being sent
    long = timedelta(hours=1)
    dispatcher = store.dispatcher(hook, transport, **time.options(), max_rate=0.0001, claim_timeout=long)
    for _ in range(5):
        began = time.seconds
        dispatcher.once(60)
        dispatcher.next_due()
        assert time.seconds - began <= 60
        assert time.seconds - dispatcher.repository.claimed_at <= 10
    assert len(transport.ids) == 1
    dispatcher.close()
