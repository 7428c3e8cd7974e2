"""The version of a store's tables: newer tables are used where that is safe, others refused."""

from __future__ import annotations

import dataclasses
import threading
from datetime import datetime, timezone

import pytest
from sqlalchemy import Column, MetaData, String, Table, event, inspect, select, update
from support.stores import Store, Transport, message

from airflow_delayed.delivery import State
from airflow_delayed.errors import TopologyError
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.store.schema import VERSION

pytestmark = pytest.mark.mariadb

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
PAST = datetime(2020, 1, 1, tzinfo=timezone.utc)


def versions(hook: DelayedStoreHook) -> list[int]:
    with hook.engine.connect() as connection:
        return sorted(connection.execute(select(hook.tables.version.c.Version)).scalars())


def test_tables_of_the_next_release_serve_this_one_too(store: Store):
    """The tables come first: hosts of both releases then work on them, and none waits for another."""
    old = store.installed()
    old.send([message(f"old{number}", PAST) for number in range(50)])
    store.sql(old, 'ALTER TABLE {s}"delayed_messages" ADD "Colour" VARCHAR(10)')
    store.sql(old, f'UPDATE {{s}}"delayed_messages_version" SET "Version" = {VERSION + 1}')
    # a host of the next release
    new = store.hook()
    messages: Table = new.table.to_metadata(MetaData())
    messages.append_column(Column("Colour", String(10), quote=True))
    new.tables = dataclasses.replace(new.tables, messages=messages)
    assert new.send(message(f"new{number}", PAST) for number in range(50)).sent == 50
    sent_by_new = Transport()
    assert store.dispatcher(new, sent_by_new, batch_size=10).run().dispatched == 100
    # one of this release, which the tables know no more than before
    other, sent_by_old = store.hook(), Transport()
    assert other.send(message(f"{name}{number}", PAST) for name in ("old", "late") for number in range(50)).sent == 50
    assert store.dispatcher(other, sent_by_old).run().dispatched == 50
    assert len({*sent_by_new.ids, *sent_by_old.ids}) == len(sent_by_new.ids + sent_by_old.ids) == 150
    report = other.verify([])
    assert report.ok
    (finding,) = (one for one in report if one.code == "version")
    assert (finding.severity, finding.found) == (
        "warning",
        f"version {VERSION + 1}, newer than this release's {VERSION}",
    )
    assert other.install([]).ok
    assert versions(other) == [VERSION + 1]
    assert other.test_connection()[1].endswith(f"; the tables are of version {VERSION + 1}")


@pytest.mark.parametrize(
    "number, usable_from, remedy",
    [
        (VERSION + 1, VERSION + 1, "update airflow-provider-delayed here"),
        (VERSION - 1, VERSION - 1, "the changelog says how to bring them to this release.*another table="),
    ],
)
def test_tables_of_another_release_are_left_alone(store: Store, number: int, usable_from: int, remedy: str):
    hook = store.installed()
    hook.send([message("a", LATER)])
    with hook.engine.begin() as connection:
        connection.execute(update(hook.tables.version).values(Version=number, UsableFrom=usable_from))
    other = store.hook()
    dispatch = StoreDispatchOperator(
        task_id="d", store_conn_id=store.conn_id, deliver_conn_ids="broker", schema=store.schema
    )
    for use in (
        lambda: other.install([]),
        lambda: other.send([message("b", LATER)]),
        other.describe_server,
        lambda: dispatch.execute({}),
    ):
        with pytest.raises(TopologyError, match=rf"version: wanted {VERSION}, found {number}.*{remedy}"):
            use()
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
    for read in (hook.dispatchers, hook.lookaheads):
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


def test_several_install_at_once(store: Store):
    first = store.hook()
    errors = []

    def install() -> None:
        try:
            store.hook(None).install(["q"], create_destinations=True)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=install) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    assert first.verify([]).ok
    assert (versions(first), first.count()) == ([VERSION], 0)
    store.dispatcher(first, Transport()).run()
