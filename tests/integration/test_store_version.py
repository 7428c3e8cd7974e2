"""The version of a store's tables: newer tables are used where that is safe, others refused."""

from __future__ import annotations

import dataclasses
import threading
from datetime import datetime, timezone

import pytest
from sqlalchemy import Column, MetaData, String, Table, select, update
from support.stores import Store, Transport, message

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
