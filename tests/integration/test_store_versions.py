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
#: Columns that each version was the first to have.
NEW = {2: ("NextTry", "LastError"), 3: ("Run", "ReplacedAt"), 4: ("Iteration", "Turn", "Anchor")}


def old_version(store: Store, hook: DelayedStoreHook, count: int, version: int) -> None:
    """Make the tables as an older version had them, and fill that of messages."""
    late = {name for number, names in NEW.items() if number > version for name in names}
    tables = [hook.tables.messages]
    if version > 1:
        tables = [table for table in hook.tables if version > 2 or table is not hook.tables.runs]
    for now in tables:
        old = [column for column in now.columns if column.name not in late]
        table = Table(
            now.name,
            MetaData(),
            *(
                Column(
                    one.name,
                    one.type,
                    primary_key=one.primary_key,
                    nullable=one.nullable,
                    autoincrement=one.autoincrement,
                    quote=True,
                )
                for one in old
            ),
            schema=now.schema,
            quote=True,
            quote_schema=True,
        )
        with hook.engine.begin() as connection:
            table.create(connection)
        for index in now.indexes:
            names = [column.name for column in index.columns]
            # version 3 was the first to have these two, and Time in others than its own
            if version < 3 and names[0] in (*late, "Destination", "NextTry"):
                continue
            columns = ", ".join(f'"{name}"' for name in (names if version > 2 else names[:1]))
            store.sql(hook, f'CREATE INDEX "{index.name}" ON {{s}}"{now.name}" ({columns})')
    messages = hook.tables.messages
    with hook.engine.begin() as connection:
        for number in range(count):
            row = {**to_row(message(f"m{number}", LATER), "broker"), "StoredAt": LATER}
            connection.execute(insert(messages).values({name: row[name] for name in row if name not in late}))
        if version > 1:
            connection.execute(insert(hook.tables.version).values(Version=version, At=LATER))
    if version == 1 and hook.engine.dialect.name == "mysql":
        store.sql(hook, f'ALTER TABLE {{s}}"{messages.name}" CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_bin')


def versions(hook: DelayedStoreHook) -> list[int]:
    with hook.engine.connect() as connection:
        return sorted(connection.execute(select(hook.tables.version.c.Version)).scalars())


def test_an_older_table_is_brought_up_and_keeps_its_rows(store: Store):
    hook = store.hook()
    old_version(store, hook, 1500, 1)
    said = f"version {VERSION} of table .*delayed_messages: missing (version 1 is there; it is brought up, and its rows"
    report = hook.verify([])
    assert str(report.problems[0]).replace(hook.table.fullname, ".*delayed_messages") == f"{said} stay)"
    assert len(report.problems) == 7  # the other tables
    plan = hook.install([], dry_run=True)
    assert [finding.state for finding in plan] == [State.PLANNED] * 7
    with hook.engine.connect() as connection:
        assert not inspect(connection).has_table(hook.tables.past.name, schema=store.schema)
    report = hook.install([])
    assert [finding.state for finding in report] == [
        State.CREATED
    ] * 11  # the indexes on Run, Destination, Tag and NextTry too
    assert hook.verify([]).ok
    assert versions(hook) == [VERSION]
    assert [finding.state for finding in hook.install([])] == [State.OK] * 7
    assert hook.count() == 1500
    # what is stored is as good as new, and what is known is known
    same = hook.send(message(f"m{number}", LATER) for number in range(1501))
    assert (same.sent, same.duplicates) == (1, 1500)
    # on MySQL and MariaDB the older one did not tell these apart
    other = {**to_row(message("m0", LATER), "broker"), "Id": "m0 "}
    with hook.engine.begin() as connection:
        connection.execute(insert(hook.table), other)
    assert hook.count() == 1502


@pytest.mark.parametrize("old", [1, 2, 3])
def test_an_upgrade_that_was_cut_short_is_taken_up_again(store: Store, old):
    hook = store.hook()
    old_version(store, hook, 3, old)
    hook.install([])
    # as if it had come to its end but for the last of its steps
    store.sql(hook, 'DROP TABLE {s}"delayed_messages_audit"')
    store.sql(hook, 'DELETE FROM {s}"delayed_messages_version"')
    if old > 1:
        store.sql(hook, f"INSERT INTO {{s}}\"delayed_messages_version\" VALUES ({old}, '2030-01-01 00:00:00')")
    assert not hook.verify([]).ok
    hook.install([])
    assert hook.verify([]).ok
    assert (versions(hook)[-1], hook.count()) == (VERSION, 3)


def test_what_has_failed_in_an_older_store_stays_too(store: Store):
    hook = store.hook()
    old_version(store, hook, 2, 2)
    names = '"Id", "Destination", "State", "Time", "Headers", "RetryCount", "DeliverConnId", "Digest"'
    store.sql(
        hook,
        f'INSERT INTO {{s}}"delayed_messages_failed" ({names}, "Reason", "FailedAt")'
        f""" SELECT {names}, 'failed', "Time" FROM {{s}}"delayed_messages" WHERE "Id" = 'm1'""",
    )
    store.sql(hook, """DELETE FROM {s}"delayed_messages" WHERE "Id" = 'm1'""")
    assert not hook.verify([]).ok
    hook.install([])
    assert hook.verify([]).ok
    assert versions(hook) == [2, VERSION]
    assert [(one.message_id, one.state, one.origin) for one in hook.list()] == [
        ("m0", "waiting", None),
        ("m1", "failed", None),
    ]
    assert hook.send(message(f"m{number}", LATER) for number in range(2)).duplicates == 2


def test_an_older_store_is_an_error_that_says_what_to_run(store: Store):
    old_version(store, store.hook(), 1, 1)
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
        with pytest.raises(
            TopologyError,
            match=rf"version: wanted {VERSION}, found {VERSION + 1}.*update airflow-provider-delayed here",
        ):
            use()
    (problem,) = other.verify([]).problems
    assert (problem.argument, problem.wanted, problem.found) == ("version", VERSION, VERSION + 1)
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


@pytest.mark.parametrize("old", [0, 1, 2, 3])
def test_several_install_at_once(store: Store, old):
    first = store.hook()
    if old:
        old_version(store, first, 50, old)
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
    assert versions(first) == ([old, VERSION] if old > 1 else [VERSION])
    with first.engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(first.table)).scalar() == (50 if old else 0)
    store.dispatcher(first, Transport()).run()
