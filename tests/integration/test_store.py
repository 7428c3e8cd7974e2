"""Storing, listing and cancelling: the same on SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

import re
import threading
import traceback
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import text
from support.stores import Store, message

from airflow_delayed.delivery import State, delivery_for, store_for
from airflow_delayed.errors import DelayedError, InvalidMessage, LimitExceeded, TopologyError
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.records import insert_new_rows, to_row

pytestmark = pytest.mark.mariadb

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)


def test_the_connections_type_leads_to_the_hook(store: Store):
    own = delivery_for(store.conn_id)
    assert isinstance(own, DelayedStoreHook)
    assert (own.deliver_conn_id, own.horizon) == (None, timedelta(0))
    assert store_for(store.conn_id, "aws_default").deliver_conn_id == "aws_default"
    assert store_for(store.conn_id, store.conn_id).deliver_conn_id is None


def test_tables_are_named_as_openlineage_has_it(store: Store):
    hook = store.installed("reminders", deliver_conn_id=None)
    own, queue = hook.own_dataset(), hook.dataset("reminders")
    assert own.namespace == queue.namespace
    fields = hook.get_connection(store.conn_id)
    where = {
        "sqlite": (f"sqlite://{fields.host}", ""),
        "postgresql": (f"postgres://{fields.host}:{fields.port}", f"{fields.schema}.{store.schema}."),
        "mysql": (f"mysql://{fields.host}:{fields.port}", f"{store.schema}."),
    }
    namespace, prefix = where[hook.engine.dialect.name]
    assert (own, queue) == ((namespace, f"{prefix}delayed_messages"), (namespace, f"{prefix}reminders"))


def test_install_twice(store: Store):
    hook = store.hook(None)
    plan = hook.install(["reminders"], create_destinations=True, dry_run=True)
    assert [finding.state for finding in plan] == [State.PLANNED] * 10
    assert hook.verify(["reminders"]).missing_destinations == ("reminders",)
    first = hook.install(["reminders"], create_destinations=True)
    assert [finding.state for finding in first] == [State.CREATED] * 10
    assert [finding.state for finding in hook.install(["reminders"])] == [State.OK] * 10
    assert hook.verify(["reminders"]).ok


def test_other_types_of_a_queue_tables_columns_are_a_warning(store: Store):
    hook = store.installed("reminders", deliver_conn_id=None)
    store.sql(hook, 'CREATE TABLE {s}"short" AS SELECT id, expires, seq, body, 1 AS headers FROM {s}"reminders"')
    try:
        report = hook.verify(["short"])
        assert report.ok
        assert re.search(r"short column headers: is .*, and an install makes it ", "\n".join(map(str, report)))
    finally:
        store.sql(hook, 'DROP TABLE {s}"short"')


def test_install_makes_no_destination_unless_told(store: Store):
    with pytest.raises(TopologyError, match=r"table .*reminders: missing") as caught:
        store.hook(None).install(["reminders"])
    assert caught.value.report.missing_destinations == ("reminders",)
    assert store.hook("broker").install(["reminders"]).ok  # it is the broker's, and the store does not look


def test_what_differs_is_named_and_left_alone(store: Store):
    hook = store.installed()
    store.sql(hook, 'ALTER TABLE {s}"delayed_messages" RENAME COLUMN "RetryCount" TO "Tries"')
    for call in (hook.verify, lambda names: hook.install(names, dry_run=True)):
        (problem,) = call([]).problems
        assert (problem.argument, problem.wanted, problem.found) == ("column RetryCount", "INTEGER", None)
    with pytest.raises(TopologyError, match="column RetryCount: wanted 'INTEGER', found None"):
        hook.install([])


def test_a_lost_index_is_made_anew(store: Store):
    hook = store.installed()
    mysql = hook.engine.dialect.name == "mysql"
    name = '"delayed_messages_Time" ON {s}"delayed_messages"' if mysql else '{s}"delayed_messages_Time"'
    store.sql(hook, f"DROP INDEX {name}")
    assert [str(problem) for problem in hook.verify([]).problems] == ["index delayed_messages_Time: missing"]
    hook.install([])
    assert hook.verify([]).ok


def test_a_table_that_is_not_there_is_not_made_in_passing(store: Store):
    hook = store.hook()
    for use in (
        lambda: hook.send([message("a", LATER)]),
        lambda: list(hook.list()),
        hook.count,
        lambda: hook.cancel("a"),
    ):
        with pytest.raises(TopologyError, match=r"delayed_messages: missing.*TopologyInstallOperator"):
            use()
    assert not hook.verify([]).ok


def test_two_tables_in_one_database(store: Store):
    store.installed()
    name = 'Of "another" `team`: 100 %s'
    other = store.hook(table=name)
    other.install([])
    other.send([message("a", LATER)])
    assert (other.count(), store.hook().count(), other.verify([]).ok) == (1, 0, True)


def test_what_is_stored_is_listed_by_due_time(store: Store):
    hook = store.installed()
    expires = LATER + timedelta(microseconds=1)
    report = hook.send(
        [
            message("later", LATER + timedelta(microseconds=1)),
            message("ID", LATER, tag="Müller", expires_at=expires),
            message("id", LATER, destination="trailing blank "),
            message("last", datetime.max.replace(tzinfo=timezone.utc)),
        ]
    )
    assert (report.sent, report.duplicates, report.first_due) == (4, 0, LATER)
    listed = list(hook.list())
    # bytewise: capitals first
    assert [one.message_id for one in listed] == ["ID", "id", "later", "last"]
    assert [one.due_at for one in listed][:3] == [LATER, LATER, LATER + timedelta(microseconds=1)]
    assert listed[3].due_at == datetime.max.replace(tzinfo=timezone.utc)
    assert (listed[0].tag, listed[0].expires_at, listed[0].deliver_conn_id) == ("Müller", expires, "broker")
    assert [one.message_id for one in hook.list(destination="trailing blank ")] == ["id"]
    assert list(hook.list(destination="trailing blank")) == []
    assert [one.message_id for one in hook.list(tag="Müller")] == ["ID"]
    assert abs(listed[0].stored_at - hook.now()) < timedelta(minutes=1)


def test_ids_are_told_apart_byte_by_byte(store: Store):
    hook = store.installed()
    # what this package lets through has no blanks; rows of others may
    ids = ["a", "A", "a ", "a  ", "ä", "a\u0308", "\U0001f600", "\U0001f601"]
    row = {**to_row(message("a", LATER), "broker"), "StoredAt": LATER}
    with hook.engine.begin() as connection:
        assert insert_new_rows(connection, hook.table, [{**row, "Id": one} for one in ids]) == set(ids)
        assert insert_new_rows(connection, hook.table, [{**row, "Id": one} for one in ids]) == set()
    assert [one.message_id for one in hook.list()] == sorted(ids)
    assert hook.cancel(["a "]) == {"a ": "cancelled"}
    assert [one.message_id for one in hook.list()] == sorted({*ids} - {"a "})


def test_a_long_stream_is_stored_as_it_comes(store: Store):
    hook, other = store.installed(), store.hook()
    counts = {}

    def stream():
        for number in range(5100):
            if number in (2499, 3000, 5099):
                counts[number] = other.count()
            yield message(f"m{number}", LATER)

    assert hook.send(stream()).sent == 5100
    assert counts == {2499: 0, 3000: 2500, 5099: 5000}
    assert hook.count() == 5100


def test_what_does_not_fit_is_refused_and_its_chunk_with_it(store: Store):
    hook = store.installed(deliver_conn_id=None)
    cases = [
        (message("a", LATER, destination="é" * 201), LimitExceeded, "destination: has 201 characters"),
        (message("a", LATER, destination="é" * 32), LimitExceeded, "destination: has 64 bytes"),
        (message("a", LATER, tag="t" * 251), LimitExceeded, "tag: has 251 characters"),
        (message("a", LATER, tag="nul\0"), InvalidMessage, "tag: has a null character"),
    ]
    for wrong, error, text_ in cases:
        with pytest.raises(error, match=text_):
            hook.send([message("good", LATER), wrong])
    assert hook.count() == 0
    store.hook().send([message("a", LATER, destination="é" * 200, tag="t" * 250)])
    assert hook.count() == 1


def test_many_store_the_same_at_once(store: Store):
    """Each in another order: the rows are there once, and the senders agree on who stored them."""
    hook = store.installed()
    messages = [message(f"m{n}", LATER) for n in range(3000)]
    reports = []

    def send(start: int) -> None:
        turned = messages[start:] + messages[:start]
        reports.append(store.hook().send(reversed(turned) if start % 2 else turned))

    threads = [threading.Thread(target=send, args=(start,)) for start in (0, 501, 1500, 2501)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(reports) == 4
    assert sum(report.sent for report in reports) == hook.count() == 3000
    assert sum(report.duplicates for report in reports) == 9000


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_those_who_store_the_same_wait_for_each_other_in_one_order(store: Store):
    """In the order given, this would be a deadlock: each would hold what the other waits for."""
    hook = store.installed()
    rows = [{**to_row(message(name, LATER), "broker"), "StoredAt": LATER} for name in ("m1", "m2")]
    reports = []
    sender = threading.Thread(
        target=lambda: reports.append(store.hook().send([message("m2", LATER), message("m1", LATER)]))
    )
    with hook.engine.begin() as connection:
        insert_new_rows(connection, hook.table, rows[:1])
        mine = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        sender.start()
        with hook.engine.connect() as watching:
            waits = text(f"SELECT count(*) FROM pg_stat_activity WHERE {mine} = ANY(pg_blocking_pids(pid))")
            while not watching.execute(waits).scalar():
                watching.rollback()
                assert sender.is_alive()
        assert insert_new_rows(connection, hook.table, rows[1:]) == {"m2"}
    sender.join(60)
    assert [(report.sent, report.duplicates) for report in reports] == [(0, 2)]


def test_an_error_of_the_database_shows_no_content(store: Store):
    hook = store.installed()
    prefix = "(20)" if hook.engine.dialect.name == "mysql" else ""
    store.sql(
        hook,
        'ALTER TABLE {s}"delayed_messages" ADD CHECK (length("State") < 3)'
        if hook.engine.dialect.name == "postgresql"
        else f'CREATE UNIQUE INDEX "one" ON {{s}}"delayed_messages" ("State"{prefix})',
    )
    content = bytes([104, 117, 115, 104])  # so that the lines of this test do not show it
    with pytest.raises(DelayedError, match=store.conn_id) as caught:
        hook.send([message("a", LATER, body=content), message("b", LATER, body=content)])
    shown = "".join(traceback.format_exception(caught.value))
    assert content.decode() not in shown
    assert content.hex() not in shown
    assert hook.count() == 0
