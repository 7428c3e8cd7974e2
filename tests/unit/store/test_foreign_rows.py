"""The rows of a foreign table, and the SQL that takes them."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from sqlalchemy import Column, MetaData, Table
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.types import NullType
from support.msmq import headers_xml

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.store.nservicebus import adopt
from airflow_delayed.store.nservicebus.foreign_table import NSERVICEBUS_COLUMNS, Reader, queue_of

DUE = datetime(2030, 1, 31, 8, 30, 0, 3000, tzinfo=timezone.utc)
ROW = {
    "Id": "a",
    "Destination": "Sales@SERVER1",
    "State": b"body",
    "Time": DUE.replace(tzinfo=None),
    "Headers": headers_xml({"a": "b"}),
    "RetryCount": 0,
}


@pytest.mark.parametrize(
    "dialect, name, wanted",
    [
        (
            postgresql.dialect(),
            '"my ] schema"."Sales.timeouts"',
            'SELECT "Id", "Destination", "State", "Time", "Headers", "RetryCount" FROM TABLE WHERE ("Id" NOT IN'
            ' (__[POSTCOMPILE_Id_1])) ORDER BY "Time" LIMIT %(param_1)s FOR UPDATE SKIP LOCKED',
        ),
        (
            mysql.dialect(),
            "`my ] schema`.`Sales.timeouts`",
            "SELECT `Id`, `Destination`, `State`, `Time`, `Headers`, `RetryCount` FROM TABLE WHERE (`Id` NOT IN"
            " (__[POSTCOMPILE_Id_1])) ORDER BY `Time` LIMIT %s FOR UPDATE SKIP LOCKED",
        ),
        (
            sqlite.dialect(),
            '"my ] schema"."Sales.timeouts"',
            'SELECT "Id", "Destination", "State", "Time", "Headers", "RetryCount" FROM TABLE WHERE ("Id" NOT IN'
            ' (__[POSTCOMPILE_Id_1])) ORDER BY "Time" LIMIT ? OFFSET ?',
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_batch_is_locked_and_locked_rows_are_passed_over(dialect, name, wanted):
    source = Table(
        "Sales.timeouts",
        MetaData(),
        *(Column(name, NullType(), quote=True) for name in NSERVICEBUS_COLUMNS),
        schema="my ] schema",
        quote=True,
        quote_schema=True,
    )
    statement = " ".join(str(adopt.due(source, ["a"], 500).compile(dialect=dialect)).split())
    # SQLAlchemy 2.1 casts the limit
    assert statement.replace(f"{name}.", "").replace(name, "TABLE").replace("::INTEGER", "") == wanted


@pytest.mark.parametrize(
    "time",
    [
        DUE,
        DUE.replace(tzinfo=None),
        DUE.astimezone(timezone(DUE - DUE.replace(hour=3))),
        # SQLite, whatever wrote it
        "2030-01-31 08:30:00.003000",
        "2030-01-31T08:30:00.003Z",
        "2030-01-31T09:30:00.003+01:00",
    ],
)
def test_a_time_without_a_zone_is_utc(time):
    assert Reader().message({**ROW, "Time": time}).due_at == DUE


@pytest.mark.parametrize(
    "columns, problem",
    [
        ({"Destination": None}, "destination: is null"),
        ({"Destination": ""}, "destination: must be the name of a queue"),
        ({"Destination": "@SERVER1"}, "destination: must be the name of a queue"),
        ({"Destination": 7}, "destination: is null or not text"),
        ({"Time": None}, "due_at: is null"),
        ({"Time": "soon"}, "due_at: 'soon' is not a time"),
        ({"Time": 7}, "due_at: must be a time"),
        ({"Id": "a b"}, "message_id: 'a b' has characters"),
        ({"State": 7}, "body: must be bytes or text, not int"),
        ({"Headers": b"hush"}, "headers: are not XML"),
    ],
)
def test_what_makes_no_message_is_named(columns, problem):
    with pytest.raises(InvalidMessage, match=problem) as caught:
        Reader().message({**ROW, **columns})
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("data", [b"hush", b"[]", b"[" * 5000, b'"a"', b"\xff", b'{"a": 1}', b'{"a": null}'])
def test_headers_that_are_no_json_object_of_texts(data):
    with pytest.raises(InvalidMessage, match="headers: ") as caught:
        Reader("json").message({**ROW, "Headers": data})
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, bytes.decode])
def test_bytes_in_each_drivers_way(kind):
    message = Reader("json").message({**ROW, "State": kind(b"body"), "Headers": kind(b'{"a": "b"}')})
    assert (message.body, message.headers) == (b"body", {"a": "b"})


@pytest.mark.parametrize("address, queue", [("Sales@SERVER1", "Sales"), ("Acme.Sales", "Acme.Sales")])
def test_the_queue_of_an_msmq_address(address, queue):
    assert queue_of(address) == queue
