"""PostgreSQL tells dispatchers that sleep of a message that is due before all others."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import psycopg
import pytest
from psycopg import sql
from support.standing import give_up, pause, record
from support.stores import Store, message

from airflow_delayed.errors import MessageConflict
from airflow_delayed.message import microseconds
from airflow_delayed.store import notify
from airflow_delayed.store.schema import store_tables

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)


def payload(due: datetime) -> str:
    return str(microseconds(due))


@pytest.fixture
def listener(store: Store, postgres_url):
    hook = store.installed()
    with psycopg.connect(postgres_url, autocommit=True) as connection, hook.engine.connect() as other:
        name = notify.channel(other, hook.table)
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(name)))
        # what was sent before a statement has arrived with its answer
        yield lambda: [one.payload for one in connection.notifies(timeout=0)] if connection.execute("SELECT 1") else []


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_only_the_new_next_is_told_of_once_a_transaction(store: Store, listener):
    hook = store.hook(on_conflict="replace")
    hook.send(message(f"m{number:04}", LATER + number * MINUTE) for number in range(2500))
    # three transactions, of which the first has the earliest
    assert listener() == [payload(LATER)]
    hook.send([message("after", LATER + MINUTE)])
    assert listener() == []
    hook.send([message("before", LATER - MINUTE), message("before2", LATER - MINUTE / 2)])
    assert listener() == [payload(LATER - MINUTE)]
    # an equal one may be told of again; what is put in place is told of as well, and what changes nothing is not
    hook.send([message("m0007", LATER - 2 * MINUTE)])
    assert listener() == [payload(LATER - 2 * MINUTE)]
    hook.send([message("m0007", LATER - 2 * MINUTE)])
    hook.send([message("m0007", LATER)])
    assert listener() == []


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_what_keeps_no_dispatcher_awake_holds_no_notice_back(store: Store, listener):
    hook, other = store.hook(), store.hook("nobody")
    other.send([message("theirs", LATER - 9 * MINUTE), message("failing", LATER - 5 * MINUTE)])
    hook.send([message("tried", LATER - 5 * MINUTE)])
    assert len(listener()) == 2
    pause(hook, ["tried"], LATER + MINUTE - hook.now())
    hook.send([message("a", LATER)])
    assert listener() == [payload(LATER)]


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_nothing_is_told_of_what_was_not_stored(store: Store, listener):
    hook = store.hook()
    hook.send([message("a", LATER)])
    listener()
    with pytest.raises(MessageConflict):
        hook.send([message("b", LATER - MINUTE), message("a", LATER - MINUTE)])
    with hook.engine.begin() as connection:
        record(connection, hook.tables, [{"Id": "c"}], "x", LATER)
    assert hook.send([message("c", LATER - MINUTE)]).duplicates == 1
    assert listener() == []


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_the_channels_name(store: Store, postgres_url):
    hook = store.hook()
    with hook.engine.connect() as connection:
        own = connection.dialect.default_schema_name
        tables = [store_tables(name, schema).messages for name in ("t", "t" * 50) for schema in (None, "ü" * 31)]
        names = [notify.channel(connection, table) for table in tables]
        assert notify.channel(connection, store_tables("t", own).messages) == names[0]
    assert len(set(names)) == 4
    assert {len(name.encode()) for name in names} == {40}


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_what_is_rescheduled_or_retried_is_told_of(store: Store, listener):
    hook = store.hook()
    hook.send(message(f"m{number}", LATER + number * MINUTE) for number in range(5))
    listener()
    hook.reschedule(["m3", "m4"], LATER + MINUTE)
    assert listener() == []
    hook.reschedule(["m3", "m4"], LATER - MINUTE)
    assert listener() == [payload(LATER - MINUTE)]
    give_up(hook, "m3", "m4")
    hook.retry(["m3", "m4"], dry_run=True)
    assert listener() == []
    hook.retry(["m3", "m4"])
    assert listener() == [payload(LATER - MINUTE)]
