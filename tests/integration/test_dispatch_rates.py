"""Rates of destinations, which all dispatchers keep together, and fair turns between destinations."""

from __future__ import annotations

import json
import time as real_time
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from support.dispatching import dispatch
from support.forked import Child
from support.rabbitmq import eventually
from support.sleeping import Time
from support.stores import Store, Transport, message, on_postgres_too

SECOND = timedelta(seconds=1)
on_sqlite = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


@dataclass
class TimedTransport(Transport):
    """Notes when each message was sent, by the test's time."""

    time: Time | None = None
    at: list[tuple[float, str]] = field(default_factory=list)

    def send(self, messages):
        def noted():
            for one in messages:
                self.at.append((self.time.seconds, one.destination))
                yield one

        return super().send(noted())


def sends(hook, start, **counts: int) -> None:
    """Store messages that are due, so many for each destination, in this order of due time."""
    for place, (destination, count) in enumerate(counts.items()):
        due = start - timedelta(minutes=len(counts) - place)
        hook.send(message(f"{destination}{n}", due + n * SECOND / 1000, destination=destination) for n in range(count))


def assert_rate_kept(moments: list[float], rate: float, burst: float) -> None:
    moments = sorted(moments)
    for first, begin in enumerate(moments):
        for last in range(first, len(moments)):
            assert last - first + 1 <= rate * (moments[last] - begin) + burst


def test_two_dispatchers_keep_one_rate_together(store: Store):
    hook = store.installed()
    time = Time(hook)
    hook.set_rates({"sms": 50})
    assert hook.rates() == {"sms": 50}
    sends(hook, time.start, sms=300, mail=100)
    transports = [TimedTransport(time=time) for _ in range(2)]
    dispatchers = [store.dispatcher(hook, one, **time.options(), batch_size=20) for one in transports]
    for step in range(60):
        time.seconds = 10 + step / 10
        # now the one first, now the other
        for dispatcher in dispatchers[:: 1 if step % 2 else -1]:
            dispatcher.once()
    for dispatcher in dispatchers:
        dispatcher.close()
    at = [one for transport in transports for one in transport.at]
    assert_rate_kept([seconds for seconds, destination in at if destination == "sms"], 50, 50)
    # a second's worth at once, and then 50 a second: all of them, by both
    assert max(seconds for seconds, _ in at) <= 15.3
    assert min(len(transport.at) for transport in transports) > 100
    assert hook.count() == 0
    # the others did not wait
    assert {seconds for seconds, destination in at if destination == "mail"} == {10}


def test_a_killed_dispatcher_makes_it_no_faster(store: Store, tmp_path):
    hook = store.installed()
    sends(hook, hook.now(), sms=250)
    url = store.url().render_as_string(hide_password=False)
    journal = tmp_path / "journal"
    shared = {"url": url, "schema": store.schema, "target": "broker", "journal": str(journal)}
    children = [Child(dispatch, **shared, hangs_after=30), Child(dispatch, **shared)]
    try:
        assert [child.answer() for child in children] == ["ready", "ready"]
        hook.set_rates({"sms": 60})
        began = real_time.monotonic()

        def sent() -> list[str]:
            found = [line.split()[0] for line in journal.read_text().splitlines()] if journal.exists() else []
            assert len(found) <= 60 * (real_time.monotonic() - began) + 60
            return found

        children[0].say("go")
        eventually(lambda: len(sent()) >= 30, 60)
        children[0].kill()
        children[1].say("go")
        eventually(lambda: hook.count() == 0 and len(set(sent())) == 250, 120)
    finally:
        for child in children:
            child.close()


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


def test_two_backlogs_share_the_claims(store: Store):
    hook, transport = store.installed(), Transport()
    time = Time(hook)
    sends(hook, time.start, first=1500, second=1500)
    store.dispatcher(hook, transport, **time.options(), batch_size=50).run()
    order = [one.destination for one in transport.sent]
    assert len(order) == 3000
    assert order[:1600].count("second") >= 400
    assert len(set(transport.ids)) == 3000


def test_queue_tables_take_turns_and_have_rates(store: Store):
    hook = store.installed("bulk", "few", "sms", deliver_conn_id=None)
    time = Time(hook)
    hook.set_rates({"sms": 20})
    sends(hook, time.start, bulk=300, few=5, sms=50)
    time.seconds = 10.0
    dispatcher = store.dispatcher(hook, **time.options(), batch_size=50)
    report = dispatcher.run()
    assert report.dispatched == 355
    # 20 at once, and 20 a second
    assert 11.4 <= time.seconds <= 12
    for name, count in (("bulk", 300), ("few", 5), ("sms", 50)):
        rows = store.rows(hook, name)
        assert len({json.loads(headers)["NServiceBus.MessageId"] for headers, _ in rows}) == len(rows) == count


@on_postgres_too
@pytest.mark.timeout(120, func_only=True)
def test_a_round_ends_that_locks_the_messages_of_another_turn_again(store: Store):
    """The turn of all destinations meets late messages that the turn of their own destination has locked."""
    hook = store.installed("first", "second", deliver_conn_id=None)
    time = Time(hook)
    sends(hook, time.start, first=15, second=3)
    assert store.dispatcher(hook, **time.options(), batch_size=10).run().dispatched == 18
    assert (len(store.rows(hook, "first")), len(store.rows(hook, "second"))) == (15, 3)


@on_postgres_too
def test_a_destination_with_a_rate_gets_nothing_ahead(store: Store):
    hook = store.installed()
    time, transport = Time(hook), Transport()
    hook.set_rates({"sms": 5})
    due = time.start + 300 * SECOND
    hook.send([message("a", due, destination="sms"), message("b", due, destination="mail")])
    dispatcher = store.dispatcher(hook, transport, **time.options(), lookahead=600 * SECOND)
    time.seconds = 10.0
    dispatcher.once()
    assert transport.ids == ["b"]
    assert dispatcher.next_due() == 290 * SECOND
    time.seconds = 300.0
    dispatcher.once()
    assert transport.ids == ["b", "a"]
    assert dispatcher.next_due() is None
    dispatcher.close()


@on_postgres_too
def test_a_dispatcher_says_when_the_next_may_go_and_follows_a_changed_rate(store: Store):
    hook = store.installed()
    time, transport = Time(hook), Transport()
    sends(hook, time.start, sms=20)
    hook.set_rates({"sms": 0.5})
    time.seconds = 100.0
    dispatcher = store.dispatcher(hook, transport, **time.options(), batch_size=1)
    dispatcher.once()
    assert len(transport.ids) == 1
    assert SECOND < dispatcher.next_due() <= 2.001 * SECOND
    time.seconds += 2.001
    dispatcher.once()
    assert len(transport.ids) == 2
    hook.set_rates({"sms": None})
    assert hook.rates() == {}
    dispatcher.once()
    assert len(transport.ids) == 20
    # one that is new is followed within 5 seconds
    sends(hook, time.start, other=20)
    hook.set_rates({"other": 0.5})
    time.seconds += 6
    dispatcher.once()
    assert len(transport.ids) == 21
    dispatcher.close()


@on_sqlite
def test_a_clock_that_is_set_back_does_not_stop_a_destination(store: Store):
    hook = store.installed()
    time, transport = Time(hook), Transport()
    sends(hook, time.start - timedelta(hours=2), sms=4)
    hook.set_rates({"sms": 1})
    time.seconds = 10.0
    dispatcher = store.dispatcher(hook, transport, **time.options())
    dispatcher.once()
    assert len(transport.ids) == 1
    time.seconds = -3600.0
    dispatcher.once()
    time.seconds += 1.1
    dispatcher.once()
    assert len(transport.ids) == 2
    dispatcher.close()


@on_postgres_too
def test_a_rate_that_holds_messages_back_is_what_verify_says(store: Store):
    hook = store.installed()
    time = Time(hook)
    # whoever may INSERT into the table chooses the name, and an operator copies the command
    name = "sms;reboot"
    sends(hook, time.start - timedelta(hours=1), **{name: 9}, mail=1)
    hook.set_rates({name: 0.001})
    dispatcher = store.dispatcher(hook, Transport(refused={"mail0"}))
    with dispatcher.repository._engine.begin() as connection:  # the bucket has a token
        connection.execute(hook.tables.rates.update().values(EmptyAt=time.start - timedelta(days=1)))
    dispatcher.once()
    with hook.engine.begin() as connection:
        connection.execute(hook.tables.messages.update().values(NextTry=None))
    (throttled, overdue) = sorted(hook.health(), key=lambda finding: finding.code, reverse=True)
    assert (throttled.code, throttled.severity, overdue.code) == ("throttled", "warning", "overdue")
    assert "8 overdue" in throttled.what
    assert "the rate of this destination, 0.001 messages a second, holds them back" in throttled.what
    assert f"airflow delayed rates --store-conn-id {store.conn_id} 'sms;reboot'=" in throttled.remedy
    assert "1 overdue" in overdue.what
    # a bucket that is full holds nothing back
    with hook.engine.begin() as connection:
        connection.execute(hook.tables.rates.update().values(EmptyAt=time.start - timedelta(days=1)))
    assert [finding.code for finding in hook.health()] == ["overdue"]
    dispatcher.close()


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
