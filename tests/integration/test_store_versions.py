"""Tables of another release: an older one is brought up with its rows, a newer one is left alone."""

from __future__ import annotations

import threading
from datetime import datetime, timezone

import pytest
from sqlalchemy import Column, MetaData, Table, func, insert, inspect, select, update
from support.stores import Store, Transport, message, store_fixture  # noqa: F401 - a fixture

from airflow_delayed.delivery import State
from airflow_delayed.errors import TopologyError
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.store.rows import to_row
from airflow_delayed.store.versions import VERSION

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
NEW = ("NextTry", "LastError")


def first_version(store: Store, hook: DelayedStoreHook, count: int) -> None:
    """Make and fill the table as version 1 had it."""
    now = hook.tables.messages
    old = [column for column in now.columns if column.name not in NEW]
    table = Table(
        now.name,
        MetaData(),
        *(Column(one.name, one.type, primary_key=one.primary_key, nullable=one.nullable, quote=True) for one in old),
        schema=now.schema,
        quote=True,
        quote_schema=True,
    )
    with hook.engine.begin() as connection:
        table.create(connection)
        rows = [{**to_row(message(f"m{number}", LATER), "broker"), "StoredAt": LATER} for number in range(count)]
        connection.execute(insert(table), rows)
    for index in now.indexes:
        (column,) = index.columns
        store.sql(hook, f'CREATE INDEX "{index.name}" ON {{s}}"{now.name}" ("{column.name}")')
    if hook.engine.dialect.name == "mysql":
        store.sql(hook, f'ALTER TABLE {{s}}"{now.name}" CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_bin')


def versions(hook: DelayedStoreHook) -> list[int]:
    with hook.engine.connect() as connection:
        return list(connection.execute(select(hook.tables.version.c.Version)).scalars())


def test_an_older_table_is_brought_up_and_keeps_its_rows(store: Store):
    hook = store.hook()
    first_version(store, hook, 1500)
    said = "version 2 of table .*delayed_messages: missing (version 1 is there; it is brought up, and its rows stay)"
    report = hook.verify([])
    assert str(report.problems[0]).replace(hook.table.fullname, ".*delayed_messages") == said
    assert len(report.problems) == 6  # the other tables
    plan = hook.install([], dry_run=True)
    assert [finding.state for finding in plan] == [State.PLANNED] * 6
    with hook.engine.connect() as connection:
        assert not inspect(connection).has_table(hook.tables.past.name, schema=store.schema)
    report = hook.install([])
    assert [finding.state for finding in report] == [State.CREATED, State.OK, *[State.CREATED] * 5]
    assert hook.verify([]).ok
    assert versions(hook) == [VERSION]
    assert [finding.state for finding in hook.install([])] == [State.OK] * 6
    assert hook.count() == 1500
    # what is stored is as good as new, and what is known is known
    same = hook.send(message(f"m{number}", LATER) for number in range(1501))
    assert (same.sent, same.duplicates) == (1, 1500)
    # on MySQL and MariaDB the older one did not tell these apart
    other = {**to_row(message("m0", LATER), "broker"), "Id": "m0 "}
    with hook.engine.begin() as connection:
        connection.execute(insert(hook.table), other)
    assert hook.count() == 1502


def test_an_upgrade_that_was_cut_short_is_taken_up_again(store: Store):
    hook = store.hook()
    first_version(store, hook, 3)
    hook.install([])
    # as if it had come to its end but for the last of its steps
    store.sql(hook, 'DROP TABLE {s}"delayed_messages_audit"')
    store.sql(hook, 'DELETE FROM {s}"delayed_messages_version"')
    assert not hook.verify([]).ok
    hook.install([])
    assert hook.verify([]).ok
    assert (versions(hook), hook.count()) == ([VERSION], 3)


def test_an_older_store_is_an_error_that_says_what_to_run(store: Store):
    first_version(store, store.hook(), 1)
    dispatch = StoreDispatchOperator(task_id="d", conn_id=store.conn_id, deliver_conn_ids="broker", schema=store.schema)
    hook = store.hook()
    for use in (
        lambda: hook.send([message("new", LATER)]),
        lambda: hook.conflicting({"m0": b""}),
        lambda: hook.known(["m0"]),
        lambda: dispatch.execute({}),
    ):
        with pytest.raises(TopologyError, match=r"version 1 is there.*TopologyInstallOperator\(conn_id="):
            use()
    hook.install([])
    assert hook.send([message("new", LATER)]).sent == 1


def test_a_newer_store_is_left_alone(store: Store):
    hook = store.installed()
    hook.send([message("a", LATER)])
    with hook.engine.begin() as connection:
        connection.execute(update(hook.tables.version).values(Version=VERSION + 1))
    other = store.hook()
    for use in (lambda: other.install([]), lambda: other.send([message("b", LATER)])):
        with pytest.raises(TopologyError, match=r"version: wanted 2, found 3.*update airflow-provider-delayed here"):
            use()
    (problem,) = other.verify([]).problems
    assert (problem.argument, problem.wanted, problem.found) == ("version", 2, 3)
    assert versions(other) == [VERSION + 1]
    assert other.count() == 1


def test_a_table_of_others_is_no_older_one(store: Store):
    hook = store.hook()
    store.sql(hook, 'CREATE TABLE {s}"delayed_messages" ("Id" INTEGER)')
    with pytest.raises(TopologyError, match="column State: wanted"):
        hook.install([])
    with hook.engine.connect() as connection:
        assert [one["name"] for one in inspect(connection).get_columns("delayed_messages", schema=store.schema)] == [
            "Id"
        ]


@pytest.mark.parametrize("old", [True, False])
def test_several_install_at_once(store: Store, old):
    first = store.hook()
    if old:
        first_version(store, first, 50)
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
    assert versions(first) == [VERSION]
    with first.engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(first.table)).scalar() == (50 if old else 0)
    store.dispatcher(first, Transport()).run()
