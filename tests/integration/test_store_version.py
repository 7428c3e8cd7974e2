"""The version of a store's tables: older tables are upgraded, newer ones used where that is safe, others refused."""

from __future__ import annotations

import dataclasses
import shlex
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import pytest
from sqlalchemy import Column, MetaData, String, Table, event, insert, inspect, select, update
from support.stores import Store, Transport, message

from airflow_delayed.delivery import State
from airflow_delayed.errors import TopologyError
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.store.records import to_row
from airflow_delayed.store.schema import VERSION, Tables

pytestmark = pytest.mark.mariadb

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
PAST = datetime(2020, 1, 1, tzinfo=timezone.utc)
#: The version that the tables had before the first release.
UNRELEASED = 5


def unreleased(store: Store, hook: DelayedStoreHook) -> None:
    """Make the tables as commit c981ef6 made them, and write to each of them."""
    hook.dialect.allow_readers(hook.engine)
    name = {"mysql": "mariadb"}.get(hook.engine.dialect.name, hook.engine.dialect.name)
    script = (Path(__file__).parent / "unreleased" / f"{name}.sql").read_text()
    if store.schema:
        quote = hook.engine.dialect.identifier_preparer.quote_identifier
        script = script.replace(quote("the_schema"), quote(store.schema))
    with hook.engine.begin() as connection:
        for statement in script.split(";\n"):
            if statement.strip():
                connection.exec_driver_sql(statement)
    rows = [
        {**to_row(message(name, LATER, tag="t"), "broker"), "StoredAt": PAST, "Run": 1}
        for name in ("waits", "failed", "cancelled", "dispatched")
    ]
    waits, failed, cancelled, dispatched = rows
    of_past = ("Id", "Destination", "Time", "Digest", "Tag", "Run", "DeliverConnId")
    contents = {
        "messages": [waits],
        "failed": [{**failed, "Reason": "failed", "FailedAt": PAST, "LastError": "no queue"}],
        "cancelled": [{**cancelled, "Until": LATER}],
        "past": [
            {**{name: row[name] for name in of_past}, "Outcome": row["Id"], "At": hook.now()}
            for row in (cancelled, dispatched)
        ],
        "audit": [{"At": PAST, "Who": "op", "Action": "cancel", "Selection": "{}", "Counts": "{}"}],
        "dispatchers": [{"Id": "d", "ConnIds": '["broker"]', "StartedAt": PAST, "SeenAt": PAST}],
        "runs": [{"DagId": "d", "RunId": "r", "TaskId": "t", "MapIndex": -1, "Digest": b"0" * 16, "At": PAST}],
        "rates": [{"Destination": "sms", "Rate": 5.0, "EmptyAt": PAST}],
        "history": [
            {"At": PAST, "Seconds": 60, "Dispatcher": "d", "ConnId": "broker", "Destination": "q", "Dispatched": 3}
        ],
        "jobs": [{"Seq": 1, "Total": 1, "State": "done", "SeenAt": PAST, "EndedAt": PAST}],
    }
    with hook.engine.begin() as connection:
        for name, written in contents.items():
            connection.execute(insert(getattr(hook.tables, name)), written)


#: Columns that the tables from before the first release lack.
ADDED = ("Reaches", "MaxRate", "Troubles", "Full", "FullMs", "Late9", "Late10", "Late11")


def contents_of(hook: DelayedStoreHook) -> dict[str, list[tuple[object, ...]]]:
    """All rows of all tables but that of the version, without the tables and the columns that the upgrade adds."""
    with hook.engine.connect() as connection:
        return {
            table.name: [
                tuple(row)
                for row in connection.execute(
                    select(*(one for one in table.columns if one.name not in ADDED)).order_by(*table.primary_key)
                )
            ]
            for table in hook.tables
            if table not in (hook.tables.version, hook.tables.pauses)
        }


def versions(hook: DelayedStoreHook) -> list[int]:
    with hook.engine.connect() as connection:
        return sorted(connection.execute(select(hook.tables.version.c.Version)).scalars())


def next_release(monkeypatch: pytest.MonkeyPatch, hook: DelayedStoreHook, *, usable_from: int) -> Tables:
    """Return the tables of a release that adds a column, and let the package be that release."""
    monkeypatch.setattr("airflow_delayed.store.version.VERSION", VERSION + 1)
    monkeypatch.setattr("airflow_delayed.store.version.USABLE_FROM", usable_from)
    messages: Table = hook.table.to_metadata(MetaData())
    messages.append_column(Column("Colour", String(10), quote=True))
    return dataclasses.replace(hook.tables, messages=messages)


def test_tables_from_before_the_first_release_are_carried_over_once(store: Store):
    hook = store.hook()
    unreleased(store, hook)
    before = contents_of(hook)
    assert all(before.values())
    dispatch = StoreDispatchOperator(
        task_id="d", store_conn_id=store.conn_id, deliver_conn_ids="broker", schema=store.schema
    )
    schema = f" --schema {shlex.quote(store.schema)}" if store.schema else ""
    command = f"airflow delayed upgrade --store-conn-id {store.conn_id}{schema}"
    for use in (
        lambda: hook.send([message("new", LATER)]),
        lambda: hook.install([]),
        hook.describe_server,
        lambda: dispatch.execute({}),
    ):
        with pytest.raises(TopologyError, match=rf"wanted {VERSION}, found {UNRELEASED}.*{command}"):
            use()
    (plan,) = hook.install([], upgrade=True, dry_run=True)
    assert (plan.state, plan.argument, plan.found) == (State.WOULD_REPAIR, "version", UNRELEASED)
    assert versions(hook) == [UNRELEASED]
    (done,) = (one for one in hook.install([], upgrade=True) if one.state is not State.OK)
    assert (done.state, done.where) == (State.REPAIRED, plan.where)
    assert [finding.state for finding in hook.install([], upgrade=True)] == [State.OK] * 13
    assert (contents_of(hook), versions(hook)) == (before, [VERSION])
    # all of it is of use
    assert hook.send([message(name, LATER, tag="t") for name in ("waits", "dispatched", "new")]).sent == 1
    assert hook.restore(["cancelled"]) == {"cancelled": "restored"}
    assert hook.retry(["failed"]) == {"failed": "retried"}
    assert hook.send([message("due", PAST)]).sent == 1
    assert (store.dispatcher(hook, Transport()).run().dispatched, hook.count()) == (1, 4)
    assert (hook.rates(), len(hook.jobs())) == ({"sms": 5}, 1)


def test_an_upgrade_that_was_cut_short_is_taken_up_again(store: Store):
    hook = store.hook()
    unreleased(store, hook)
    hook.install([], upgrade=True)
    # as if it had come to its end but for the last of its steps
    store.sql(hook, 'DROP TABLE {s}"delayed_messages_audit"')
    store.sql(hook, f'UPDATE {{s}}"delayed_messages_version" SET "Version" = {UNRELEASED}, "UsableFrom" = NULL')
    # and of a store that was upgraded before that
    store.sql(
        hook,
        'INSERT INTO {s}"delayed_messages_version" SELECT 4, "At", NULL, NULL FROM {s}"delayed_messages_version"',
    )
    assert not hook.verify([]).ok
    hook.install([], upgrade=True)
    assert hook.verify([]).ok
    assert (versions(hook), hook.count()) == ([VERSION], 1)


@pytest.mark.parametrize("store", ["postgres", "mariadb"], indirect=True)
def test_an_upgrade_waits_for_its_lock_only_briefly(store: Store):
    """A long transaction holds the upgrade up, and the upgrade holds up nobody behind it."""
    hook = store.hook()
    unreleased(store, hook)
    with ThreadPoolExecutor(1) as threads, hook.engine.connect() as long:
        long.execute(select(hook.tables.version.c.Version)).all()
        upgrade = threads.submit(store.hook().install, [], upgrade=True)
        for _ in range(5):
            assert versions(hook) == [UNRELEASED]
        long.rollback()
        upgrade.result(120)
    assert versions(hook) == [VERSION]


def test_tables_of_the_next_release_serve_this_one_too(store: Store, monkeypatch: pytest.MonkeyPatch):
    """The tables are upgraded first: hosts of both releases then work on them, and none waits for another."""
    old = store.installed()
    old.send([message(f"old{number}", PAST) for number in range(50)])
    with monkeypatch.context() as patched:
        tables = next_release(patched, old, usable_from=VERSION)
        # a host of the next release
        new = store.hook()
        new.tables = tables
        assert [one.found for one in new.install([], upgrade=True) if one.state is State.REPAIRED] == [VERSION]
        assert new.send(message(f"new{number}", PAST) for number in range(50)).sent == 50
        sent_by_new = Transport()
        assert store.dispatcher(new, sent_by_new, batch_size=10).run().dispatched == 100
        assert new.verify([]).ok
    # one of this release, which the tables know no more than before
    other, sent_by_old = store.hook(), Transport()
    assert other.send(message(f"{name}{number}", PAST) for name in ("old", "late") for number in range(50)).sent == 50
    assert store.dispatcher(other, sent_by_old).run().dispatched == 50
    assert len({*sent_by_new.ids, *sent_by_old.ids}) == len(sent_by_new.ids + sent_by_old.ids) == 150
    report = other.verify([])
    assert report.ok
    (finding,) = (one for one in report if one.code == "store-ahead")
    assert (finding.severity, finding.found) == (
        "warning",
        f"version {VERSION + 1}, newer than this release's {VERSION}",
    )
    assert other.install([], upgrade=True).ok
    assert versions(other) == [VERSION + 1]
    assert other.test_connection()[1].endswith(f"; the tables are of version {VERSION + 1}")


def test_tables_of_another_release_are_left_alone(store: Store, monkeypatch: pytest.MonkeyPatch):
    hook = store.installed()
    hook.send([message("a", LATER)])
    with monkeypatch.context() as patched:
        # a host that came before its tables
        early = store.hook()
        early.tables = next_release(patched, hook, usable_from=VERSION + 1)
        with pytest.raises(TopologyError, match=f"wanted {VERSION + 1}, found {VERSION}.*airflow delayed upgrade"):
            early.send([message("b", LATER)])
        early.install([], upgrade=True)
    for usable_from, number, remedy in (
        (VERSION + 1, VERSION + 1, "update airflow-provider-delayed here"),
        (None, 4, "cannot be upgraded.*another table="),
    ):
        with hook.engine.begin() as connection:
            connection.execute(update(hook.tables.version).values(Version=number, UsableFrom=usable_from))
        other = store.hook()
        wanted = rf"version: wanted {VERSION}, found {number}.*{remedy}"
        with pytest.raises(TopologyError, match=wanted):
            other.install([], upgrade=True)
        with pytest.raises(TopologyError, match=wanted):
            other.send([message("b", LATER)])
        (problem,) = other.verify([]).problems
        assert (problem.argument, problem.wanted, problem.found) == ("version", VERSION, number)
        assert (versions(other), other.count()) == ([number], 1)


def test_no_statement_of_an_open_store_asks_for_the_version(store: Store):
    hook = store.installed()
    hook.send([message("first", LATER)])
    statements: list[str] = []

    @event.listens_for(hook.engine, "before_cursor_execute")
    def note(connection, cursor, statement, parameters, context, executemany) -> None:
        if not statement.startswith("SET "):
            statements.append(statement)

    assert hook.cancel(["first"]) == {"first": "cancelled"}
    # of the clock, the message, failed ones, leases, cancelled ones that are old, and its move, record and audit
    assert len(statements) <= 9, statements
    hook.restore(["first"])
    hook.page(state="dispatched", tag="t")
    hook.erase(["first"])
    hook.send([message("due", PAST)])
    assert store.dispatcher(hook, Transport()).run().dispatched == 1
    for read in (hook.jobs, hook.dispatchers, hook.rates, hook.lookaheads):
        read()
    assert [one for one in statements if "_version" in one] == []


def test_a_missing_index_is_made(store: Store):
    hook = store.hook()
    hook.install([])
    index = "delayed_messages_audit_At"
    on = ' ON {s}"delayed_messages_audit"' if hook.engine.dialect.name == "mysql" else ""
    schema = "" if on else "{s}"
    store.sql(hook, f'DROP INDEX {schema}"{index}"{on}')
    assert [one.where for one in hook.verify([]).problems] == [f"index {index}"]
    assert [one.where for one in hook.install([]) if one.state is State.CREATED] == [f"index {index}"]
    assert hook.verify([]).ok


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_an_index_that_an_interrupted_install_left_is_made_again(store: Store):
    hook = store.hook()
    hook.install([])
    store.sql(
        hook,
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid ="
        """ CAST('{s}"delayed_messages_audit_At"' AS regclass)""",
    )
    assert [one.where for one in hook.verify([]).problems] == ["index delayed_messages_audit_At"]
    hook.install([])
    assert hook.verify([]).ok


def test_a_table_of_others_is_no_older_one(store: Store):
    hook = store.hook()
    store.sql(hook, 'CREATE TABLE {s}"delayed_messages" ("Id" INTEGER)')
    with pytest.raises(TopologyError, match="column State: wanted"):
        hook.install([])
    with hook.engine.connect() as connection:
        assert [one["name"] for one in inspect(connection).get_columns("delayed_messages", schema=store.schema)] == [
            "Id"
        ]


@pytest.mark.parametrize("old", [False, True])
def test_several_install_at_once(store: Store, old):
    first = store.hook()
    if old:
        unreleased(store, first)
    errors = []

    def install() -> None:
        try:
            store.hook(None).install(["q"], create_destinations=True, upgrade=True)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=install) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    assert first.verify([]).ok
    assert (versions(first), first.count()) == ([VERSION], 1 if old else 0)
    store.dispatcher(first, Transport()).run()
