"""Dispatching: what, when, and what becomes of the rest; the same on SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

import json
import logging
import re
from datetime import datetime, timedelta, timezone
from uuid import UUID

import pytest
from sqlalchemy import delete, update
from support.stores import Store, Transport, message

from airflow_delayed.errors import TopologyError
from airflow_delayed.store.dispatch.report import DispatchFailed

pytestmark = pytest.mark.mariadb

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)


def test_what_is_due_within_the_lookahead_goes_oldest_first(store: Store):
    hook, transport = store.installed(), Transport()
    now = hook.now()
    dues = {"third": 14, "first": -600, "fourth": 14.5, "second": 0, "later": 16}
    hook.send(message(name, now + due * MINUTE) for name, due in dues.items())
    report = store.dispatcher(hook, transport, lookahead=15 * MINUTE, batch_size=2).run()
    assert transport.ids == ["first", "second", "third", "fourth"]
    assert (report.dispatched, report.by_connection) == (4, {"broker": 4})
    assert (report.first_due, report.last_due) == (now - 600 * MINUTE, now + 14.5 * MINUTE)
    assert [one.message_id for one in hook.list()] == ["later"]
    assert transport.closed == 1
    assert json.dumps(report.to_json())


def test_the_databases_clock_decides(store: Store):
    """This machine's clock is 20 minutes behind the database's, as far as the dispatcher can see."""
    hook, transport = store.installed(), Transport()
    ahead = datetime.now(timezone.utc) + 20 * MINUTE
    hook.send([message("due", ahead + MINUTE), message("not-yet", ahead + 10 * MINUTE)])
    dispatcher = store.dispatcher(
        hook,
        transport,
        lookahead=5 * MINUTE,
        database_time=lambda connection: hook.now() + 20 * MINUTE,
    )
    dispatcher.run()
    assert transport.ids == ["due"]
    # the delay that remains is by the database's clock too
    assert timedelta(0) < transport.delays["due"] <= MINUTE + SECOND


def test_everything_that_a_message_says_arrives(store: Store):
    hook, transport = store.installed(), Transport()
    first = message(
        "M-1",
        hook.now() - SECOND,
        destination="Größe 'und' \"so\" ",
        body=bytes(range(256)) * 1000,
        headers={"ключ/\\": 'wert\0"\n\U0001f600'},
        tag="t",
        expires_at=hook.now() + MINUTE,
    )
    empty = message("M-2", hook.now(), body=b"")
    hook.send([first, empty])
    store.dispatcher(hook, transport).run()
    assert transport.sent == [first, empty]
    assert [one.body for one in transport.sent] == [first.body, b""]


def test_rows_of_connections_that_are_not_listed_are_left_and_counted(store: Store):
    hook, transport = store.installed("q"), Transport()
    now = hook.now()
    hook.send([message("ours", now)])
    store.hook("other").send([message("theirs", now), message("theirs-later", now + 10 * MINUTE)])
    store.hook(None).send([message("queue", now)])
    report = store.dispatcher(hook, transport, lookahead=MINUTE).run()
    assert (transport.ids, report.left_to_others) == (["ours"], 2)
    assert [one.message_id for one in hook.list()] == ["queue", "theirs", "theirs-later"]
    report = store.dispatcher(hook, lookahead=MINUTE).run()
    assert (report.by_connection, report.left_to_others, hook.count()) == ({hook.conn_id: 1}, 1, 2)


def test_what_has_expired_is_not_dispatched(store: Store):
    hook, transport = store.installed(), Transport()
    now = hook.now()
    hook.send([message("late", now - MINUTE, expires_at=now - SECOND), message("good", now, expires_at=now + MINUTE)])
    report = store.dispatcher(hook, transport).run("empty")
    assert (transport.ids, report.expired, hook.count()) == (["good"], 1, 0)
    assert store.given_up(hook) == {"late": ("expired", 0, None)}
    assert store.past(hook) == {"good": "dispatched"}


def failed(dispatcher, until=None) -> DispatchFailed:
    with pytest.raises(DispatchFailed) as caught:
        dispatcher.run(until)
    assert "body of" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("batch_size", [2, 500])
def test_a_bad_destination_holds_up_nobody(store: Store, batch_size):
    hook, transport = store.installed(), Transport(missing={"gone"})
    now = hook.now()
    hook.send(
        message(f"m{n:03}", now - SECOND + n * SECOND / 1000, destination="gone" if n % 3 == 1 else f"q{n % 3}")
        for n in range(100)
    )
    error = failed(store.dispatcher(hook, transport, batch_size=batch_size))
    good = [f"m{n:03}" for n in range(100) if n % 3 != 1]
    # on a machine so slow that they are late, the destinations take turns
    assert sorted(transport.ids) == good
    assert error.report.dispatched == len(good)
    assert "no destination gone; make it" in str(error)
    # trying again would not make it: they are given up at once, and nothing is left
    assert len(error.failures) == error.report.failed == 33
    assert set(store.given_up(hook).values()) == {("failed", 1, "connection 'broker' has no destination gone; make it")}
    assert hook.count() == 0
    assert store.past(hook) == dict.fromkeys(good, "dispatched")


def test_a_message_at_fault_holds_up_nobody_and_is_tried_again(store: Store):
    hook, transport = store.installed(), Transport(refused={"m1", "m5"}, too_long={"m2"})
    start = hook.now()
    passed = timedelta(0)
    hook.send(message(f"m{n}", start - SECOND + n * SECOND / 1000) for n in range(7))
    # no time passes by itself
    options = {"database_time": lambda connection: start + passed, "monotonic": lambda: passed.total_seconds()}
    options |= {"number_of_retries": 2, "batch_size": 3}
    error = failed(store.dispatcher(hook, transport, **options))
    assert transport.ids == ["m0", "m3", "m4", "m6"]
    # what can never be sent is given up at once
    assert error.failures == {"m2": "body: has too many bytes"}
    assert error.report.retried == 2
    assert store.failures_of(hook) == {"m1": 1, "m5": 1}
    # not before its pause of up to a second is over
    passed = SECOND / 4
    assert store.dispatcher(hook, transport, **options).run().retried == 0
    passed = SECOND
    assert store.dispatcher(hook, transport, **options).run().retried == 2
    assert store.failures_of(hook) == {"m1": 2, "m5": 2}
    transport.refused.remove("m5")
    passed = 10 * SECOND
    # two retries are three attempts
    assert failed(store.dispatcher(hook, transport, **options)).failures == {"m1": "refused"}
    assert transport.ids[4:] == ["m5"]
    assert store.given_up(hook) == {"m1": ("failed", 3, "refused"), "m2": ("failed", 1, "body: has too many bytes")}
    assert store.leased(hook) == set()


def test_what_a_transport_does_not_account_for_is_kept(store: Store):
    hook, transport = store.installed(), Transport(refused={"m1"}, silent=True)
    hook.send(message(f"m{n}", hook.now()) for n in range(3))
    assert store.dispatcher(hook, transport).run().retried == 3
    assert store.failures_of(hook) == {"m0": 1, "m1": 1, "m2": 1}
    assert store.leased(hook) == set()


def test_a_row_that_says_nothing_sensible_holds_up_nobody(store: Store):
    hook, transport = store.installed(), Transport()
    hook.send(message(f"m{n}", hook.now()) for n in range(3))
    with hook.engine.begin() as connection:
        connection.execute(update(hook.table).where(hook.table.c.Id == "m1").values(Headers=b"<ArrayOfHeaderInfo/>"))
    error = failed(store.dispatcher(hook, transport))
    assert sorted(transport.ids) == ["m0", "m2"]
    assert error.failures == {"m1": "headers: are not a JSON object in UTF-8"}


def test_a_lost_connection_is_no_failure_of_its_messages(store: Store):
    hook, transport = store.installed("q"), Transport(lost_after=0)
    hook.send(message(f"m{n}", hook.now() - SECOND) for n in range(3))
    store.hook(None).send([message("queue", hook.now() - SECOND)])
    error = failed(store.dispatcher(hook, transport, deliver_conn_ids=["broker", hook.conn_id]), "empty")
    assert re.fullmatch(
        r"connection 'broker': dispatching has failed since .* UTC \(limit 0 s\), last with: reset by peer",
        error.unavailable["broker"],
    )
    assert (error.failures, error.report.failed) == ({}, 0)
    # the other connection's were dispatched all the same
    assert error.report.by_connection == {hook.conn_id: 1}
    assert store.failures_of(hook) == {"m0": 0, "m1": 0, "m2": 0}
    transport.lost_after = None
    assert store.dispatcher(hook, transport).run().dispatched == 3


def test_what_was_confirmed_before_the_connection_was_lost_is_not_sent_again(store: Store):
    hook, transport = store.installed(), Transport(lost_after=2, counts_when_lost=True)
    hook.send(message(f"m{n}", hook.now() - SECOND + n * SECOND / 1000) for n in range(5))
    error = failed(store.dispatcher(hook, transport))
    assert (error.failures, error.report.dispatched) == ({}, 2)
    assert store.failures_of(hook) == {"m2": 0, "m3": 0, "m4": 0}
    assert store.leased(hook) == set()
    transport.lost_after = None
    store.dispatcher(hook, transport).run()
    assert transport.ids == ["m0", "m1", "m2", "m3", "m4"]


def test_a_defect_of_a_transport_leaves_the_rows_as_they_are(store: Store):
    class Broken(Transport):
        def send(self, messages):
            raise RuntimeError(f"cannot send {next(iter(messages)).body!r}")

    hook = store.installed()
    hook.send([message("a", hook.now())])
    error = failed(store.dispatcher(hook, Broken()))
    assert error.unavailable["broker"].endswith("last with: RuntimeError")
    assert isinstance(error.__cause__, RuntimeError)
    assert store.failures_of(hook) == {"a": 0}
    assert store.leased(hook) == set()


def test_until_empty_sleeps_until_the_next_is_due(store: Store, caplog):
    hook, transport = store.installed(), Transport()
    start = hook.now()
    passed = timedelta(0)
    naps = []

    def sleep(seconds: float) -> None:
        nonlocal passed
        naps.append(seconds)
        passed += timedelta(seconds=seconds)
        if len(naps) == 2:  # stored meanwhile, and due before the next known one
            hook.send([message("meanwhile", start + passed)])

    hook.send([message("first", start), message("last", start + timedelta(seconds=85))])
    dispatcher = store.dispatcher(
        hook,
        transport,
        lookahead=MINUTE,
        database_time=lambda connection: start + passed,
        sleep=sleep,
        monotonic=lambda: passed.total_seconds(),
    )
    with caplog.at_level(logging.INFO):
        report = dispatcher.run("empty")
    assert transport.ids == ["first", "meanwhile", "last"]
    # 85 - 60, and never longer than a second
    assert naps == [1] * 25
    assert report.dispatched == 3
    assert transport.delays == {"first": timedelta(0), "meanwhile": timedelta(0), "last": MINUTE}


def test_a_store_without_its_table(store: Store):
    with pytest.raises(TopologyError, match="TopologyInstallOperator"):
        store.dispatcher(store.hook(), Transport()).run()


# -- queue tables ----------------------------------------------------------------------------------------------------


def test_a_queue_table_has_the_shape_of_nservicebus(store: Store):
    hook = store.installed('Sales "2"', deliver_conn_id=None)
    now = hook.now()
    name = "8d5d2a8c-9c4f-4f0e-9d5e-0a8f6f1f2f3a"
    hook.send(
        [
            message(
                name,
                now - SECOND,
                destination='Sales "2"',
                body=b"\0\xff",
                headers={"ü": "/", "NServiceBus.MessageId": "?"},
            ),
            message("no-uuid", now - 0.5 * SECOND, destination='Sales "2"', body=b""),
            message("later", now + 10 * MINUTE, destination='Sales "2"'),
        ]
    )
    report = store.dispatcher(hook, lookahead=MINUTE * 60).run()
    assert report.to_json()["by_connection"] == {hook.conn_id: 2}
    rows = store.sql(hook, 'SELECT id, expires, headers, body, seq FROM {s}"Sales ""2""" ORDER BY seq')
    assert UUID(str(rows[0].id)) == UUID(name)
    assert [json.loads(row.headers)["NServiceBus.MessageId"] for row in rows] == [name, "no-uuid"]
    assert json.loads(rows[0].headers)["ü"] == "/"
    assert [(bytes(row.body), row.expires) for row in rows] == [(b"\0\xff", None), (b"", None)]
    assert rows[0].seq < rows[1].seq
    # nothing ahead of time: a queue table cannot hold it back
    assert [one.message_id for one in hook.list()] == ["later"]


def test_ids_that_look_alike_are_different_rows(store: Store):
    hook = store.installed("q", deliver_conn_id=None)
    names = [
        "abcdefab-0000-4000-8000-0123456789ab",
        "ABCDEFAB-0000-4000-8000-0123456789AB",
        "abcdefab000040008000" + "0123456789ab",
        "a",
        "A",
    ]
    hook.send(message(name, hook.now()) for name in names)
    store.dispatcher(hook).run()
    rows = store.rows(hook, "q")
    assert sorted(json.loads(headers)["NServiceBus.MessageId"] for headers, _ in rows) == sorted(names)


def test_delivered_again_while_it_is_still_there_is_recognised(store: Store):
    hook = store.installed("q", deliver_conn_id=None)
    due = hook.now()
    hook.send([message("a", due, headers={"x": "1"})])
    store.dispatcher(hook).run()
    # a late retry, when the store has forgotten it
    with hook.engine.begin() as connection:
        connection.execute(delete(hook.tables.past))
    hook.send([message("a", due, headers={"x": "1"})])
    store.dispatcher(hook).run()
    assert (hook.count(), len(store.rows(hook, "q"))) == (0, 1)
    with hook.engine.begin() as connection:
        connection.execute(delete(hook.tables.past))
    hook.send([message("a", due, headers={"x": "2"}), message("b", due)])
    error = failed(store.dispatcher(hook))
    assert error.failures == {"a": "table 'q' has this id with other content"}
    assert (hook.count(), len(store.rows(hook, "q"))) == (0, 2)


def test_bad_queue_tables_hold_up_nobody(store: Store):
    hook = store.installed("good", deliver_conn_id=None)
    store.sql(hook, 'CREATE TABLE {s}"users" (id INTEGER, headers VARCHAR(10))')
    destinations = ["good", "missing", "users", "delayed_messages", "strict"]
    hook.install(["strict"], create_destinations=True)
    prefix = "(20)" if hook.engine.dialect.name == "mysql" else ""
    store.sql(hook, f'CREATE UNIQUE INDEX "one" ON {{s}}"strict" (body{prefix})')
    hook.send(
        message(f"{name}{n}", hook.now(), destination=name, body=b"the same") for name in destinations for n in range(2)
    )
    error = failed(store.dispatcher(hook, number_of_retries=0))
    assert len(store.rows(hook, "good")) == 2
    # the second row with this body is refused, not the first
    assert error.report.dispatched == 3
    assert "run TopologyInstallOperator" in error.failures["missing0"]
    assert "is no queue table" in error.failures["users0"]
    assert "is no queue table" in error.failures["delayed_messages1"]
    assert "table 'strict'" in error.failures["strict1"]
    assert "the same" not in str(error.failures)
    assert len(store.rows(hook, "strict")) == 1
    assert store.failures_of(hook) == {}
    assert set(store.given_up(hook)) == {f"{name}{n}" for name in destinations[1:] for n in range(2)} - {"strict0"}
