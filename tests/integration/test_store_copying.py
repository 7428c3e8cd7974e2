"""Storing on PostgreSQL without Airflow, by each driver: with COPY, and with INSERT where a driver has none we know."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine, delete, event, select, text
from support.stores import message

from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import DelayedError, MessageConflict, TransportUnavailable
from airflow_delayed.identity import Origin
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store import bulk
from airflow_delayed.store.api import Store, engine_options, prepare
from airflow_delayed.store.engine import database_errors
from airflow_delayed.store.records import insert_rows, to_message, to_row
from airflow_delayed.store.schema import Tables, store_tables

pytestmark = pytest.mark.mariadb

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
ODD = 'a\\b\t"c"\r\n{%s} %(x)s ü☂\\N'


@pytest.fixture(params=["psycopg", "psycopg2", "another driver"])
def engine(request, postgres_url, monkeypatch):
    driver = request.param if request.param in bulk.COPY_DRIVERS else "psycopg2"
    made = create_engine(f"postgresql+{driver}://{postgres_url.partition('://')[2]}", **engine_options("postgresql"))
    if request.param not in bulk.COPY_DRIVERS:
        monkeypatch.setattr(bulk, "COPY_DRIVERS", ())
    yield prepare(made)
    made.dispose()


@pytest.fixture(scope="module")
def made(postgres_url):
    """Tables that are made once, with a name that is odd to each driver."""
    engine = prepare(create_engine(f"postgresql+psycopg://{postgres_url.partition('://')[2]}"))
    found = store_tables(f'100%s "of" {uuid4().hex[:8]}')
    Store("the store", lambda: engine, "broker", table=found.messages.name).install([])
    yield found
    with engine.begin() as connection:
        for table in found:
            table.drop(connection)
    engine.dispose()


@pytest.fixture
def tables(engine, made):
    yield made
    with engine.begin() as connection:
        for table in made:
            if table is not made.version:
                connection.execute(delete(table))


def enqueue(
    engine: Engine, tables: Tables, messages: Iterable[DelayedMessage], conn_id: str = "broker", **options: Any
) -> SendReport:
    return Store("the store", lambda: engine, conn_id, table=tables.messages.name, **options).send(messages)


def there(engine, tables) -> dict:
    with engine.connect() as connection:
        found = connection.execute(select(tables.messages)).mappings().all()
    return {row["Id"]: to_message(row) for row in found}


def test_all_that_a_message_says_arrives(engine, tables):
    sent = [
        message(f"a\\{number}", LATER + timedelta(microseconds=number), destination=f"{ODD}{number % 3}", **fields)
        for number, fields in enumerate(
            [
                {},
                {"tag": ODD, "headers": {ODD: ODD}},
                {"body": bytes(range(256)) * 9, "tag": "t"},
                {"body": b"", "expires_at": LATER + timedelta(days=1)},
                {"tag": "\\N"},
            ]
        )
    ]
    first = message("first", datetime(1, 1, 1, tzinfo=timezone.utc))
    last = message("last", datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=timezone.utc))
    sent += [first, last]
    origin = Origin(dag_id="d", run_id="r", task_id="t")
    report = enqueue(engine, tables, sent, "broker", origin=origin)
    assert (report.sent, report.duplicates) == (len(sent), 0)
    assert (report.first_due, report.last_due) == (first.due_at, last.due_at)
    assert there(engine, tables) == {one.message_id: one for one in sent}
    assert enqueue(engine, tables, sent, "broker", origin=origin).duplicates == len(sent)


def test_some_are_there_already(engine, tables):
    """In the first 2500, in one behind it, twice in one; and failed or remembered ones."""
    count = 2510
    ones = [message(f"m{number:05d}", LATER) for number in range(count)]
    assert enqueue(engine, tables, ones[::7]).sent == len(ones[::7])
    report = enqueue(engine, tables, [*ones, ones[3]])
    assert (report.sent, report.duplicates) == (count - len(ones[::7]), len(ones[::7]) + 1)
    assert enqueue(engine, tables, [*ones, message("new", LATER)]).sent == 1
    other = message(ones[5].message_id, LATER, body=b"other")
    new = message("another", LATER)
    with pytest.raises(MessageConflict, match="m00005"):
        enqueue(engine, tables, [new, other])
    assert "another" not in there(engine, tables)
    assert enqueue(engine, tables, [new, other], on_conflict="replace").replaced == 1
    sent = message("sent", LATER)
    Store("the store", lambda: engine, "broker", table=tables.messages.name).note_sent([sent])
    report = enqueue(engine, tables, [sent, message("newest", LATER)])
    assert (report.sent, report.duplicates) == (1, 1)
    assert "sent" not in there(engine, tables)


def test_several_store_the_same_at_once(engine, tables):
    ones = [message(f"m{number:05d}", LATER) for number in range(500)]
    start = threading.Barrier(4)
    reports, errors = [], []

    def work(step: int) -> None:
        start.wait()
        try:
            reports.append(enqueue(engine, tables, ones[::step], "broker"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(step,)) for step in (1, -1, 1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert sum(report.sent for report in reports) == 500
    assert sum(report.duplicates for report in reports) == 1500
    assert len(there(engine, tables)) == 500


def insert(engine, tables, *rows: dict) -> None:
    with database_errors("the store", engine), engine.begin() as connection:
        insert_rows(connection, tables.messages, rows)


def test_what_goes_wrong_is_told_as_of_any_other_statement(engine, tables):
    row = {**to_row(message("a", LATER, body=b"hush"), "broker"), "StoredAt": LATER}
    with pytest.raises(DelayedError, match="connection 'the store': duplicate key value violates unique constraint"):
        insert(engine, tables, row, row)
    with pytest.raises(DelayedError, match="value too long for type character varying") as caught:
        insert(engine, tables, row, {**row, "Id": "b", "Destination": "hush" * 99})
    assert "hush" not in str(caught.value)
    assert there(engine, tables) == {}


def test_a_connection_that_is_lost_is_not_used_again(engine, tables):
    rows = [{**to_row(message("a", LATER), "broker"), "StoredAt": LATER}]
    with engine.connect() as connection, engine.connect() as other:
        backend = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        other.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": backend})
        with pytest.raises(TransportUnavailable), database_errors("the store", engine):
            insert_rows(connection, tables.messages, rows)
        assert connection.invalidated
    assert enqueue(engine, tables, [message("a", LATER)], "broker").sent == 1


def test_large_bodies_that_are_known_already_go_in_portions(engine, tables, monkeypatch):
    """PostgreSQL refuses a parameter of 1 GB, which 2500 large bodies are soon."""
    monkeypatch.setattr("airflow_delayed.store.bulk.ARRAYS", 1000)
    made = [message(f"large-{number}", LATER, body=b"x" * 300) for number in range(20)]
    enqueue(engine, tables, made[:5])
    longest = []

    @event.listens_for(engine, "before_cursor_execute")
    def note(connection, cursor, statement, parameters, context, executemany):
        if statement.startswith("INSERT"):
            values = parameters.values() if isinstance(parameters, dict) else parameters
            longest.append(max((len(value) for value in values if isinstance(value, str)), default=0))

    report = enqueue(engine, tables, made)
    assert (report.sent, report.duplicates) == (15, 5)
    assert there(engine, tables).keys() == {one.message_id for one in made}
    assert max(longest) < 4000
