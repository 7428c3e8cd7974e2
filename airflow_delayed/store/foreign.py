"""A table of delayed messages that another store wrote: NServiceBus's, or one with other names. No Airflow here.

SqlServerDelayedMessageStore of NServiceBus.Transport.Msmq 2.0.7 (Sql/SqlConstants.cs) has the columns Id, Destination,
State (the body), Time (a datetime without a zone, in UTC), Headers (see :mod:`airflow_delayed.store.header_xml`) and
RetryCount. Id is MSMQ's own id of the message (``{guid}\\{number}``); the one that NServiceBus goes by is the header
``NServiceBus.MessageId``, and both stay. What it does to a row before it sends it (MsmqMessageDispatcher.cs,
``DispatchDelayedMessage``) is done here too: headers that begin with ``NServiceBus.Timeouts.Properties.`` are its own
and are left out. A header that is null is left out as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, get_args

from sqlalchemy import Column, Connection, Engine, Inspector, MetaData, Table, inspect
from sqlalchemy.types import NullType

from airflow_delayed.errors import InvalidMessage, SourceError, UnsupportedColumns
from airflow_delayed.message import UTC, DelayedMessage, parse_time
from airflow_delayed.store import header_xml
from airflow_delayed.store.drivers import NoTime
from airflow_delayed.store.rows import headers_of
from airflow_delayed.store.settling import MAX_RETRY_COUNT

#: How a foreign table keeps headers: NServiceBus's XML, or one JSON object of text by text; both as UTF-8.
HeaderFormat = Literal["xml", "json"]

SEEDS_COLUMNS = ("Id", "Destination", "State", "Time", "Headers", "RetryCount")
#: Columns that a table of ours has and no other would.
_OURS = {"Digest", "DeliverConnId"}
#: MsmqUtilities.cs, PropertyHeaderPrefix.
_PROPERTIES = "NServiceBus.Timeouts.Properties."


def queue_of(destination: str) -> str:
    """Return the queue of an MSMQ address, ``Sales`` for ``Sales@SERVER1`` (MsmqAddress.cs, ``Parse``)."""
    return destination.partition("@")[0]


def foreign_table(
    engine: Engine, name: str, *, schema: str | None = None, columns: Mapping[str, str] | None = None
) -> Table:
    """Look at a foreign table, and return it; its columns have the seed's names as keys, and names as they are there.

    :param columns: the names of columns that are called otherwise, by the seed's name: ``{"Id": "message_id"}``.
    :raises ValueError: ``columns`` names one that the seed does not have.
    :raises SourceError: the table is not there, or its ids need not be unique, or it is one of this package.
    :raises UnsupportedColumns: a column is not there.
    """
    names = {**dict(zip(SEEDS_COLUMNS, SEEDS_COLUMNS, strict=True)), **(columns or {})}
    if unknown := sorted(names.keys() - set(SEEDS_COLUMNS)):
        raise ValueError(f"columns= names {', '.join(unknown)}; it translates {', '.join(SEEDS_COLUMNS)}")
    table = Table(
        name,
        MetaData(),
        # no type: values come as the driver has them, and one that makes no sense spoils its own row only
        *(Column(names[key], NullType(), key=key, quote=True) for key in SEEDS_COLUMNS),
        schema=schema,
        quote=True,
        quote_schema=True,
    )
    with engine.connect().execution_options(read_only=True) as connection:
        _check(connection, table)
    return table


def _check(connection: Connection, table: Table) -> None:
    inspector = inspect(connection)
    what = f"table {table.fullname}"
    if not inspector.has_table(table.name, schema=table.schema):
        raise SourceError(f"{what} is not there; write table= and schema= as the database does, case included")
    there = [column["name"] for column in inspector.get_columns(table.name, schema=table.schema)]
    if _OURS.issubset(there):
        raise SourceError(f"{what} is a store of this package already; a dispatcher delivers from it as it is")
    for column in table.columns:
        if column.name not in there:
            raise UnsupportedColumns(
                f"{what} has no column {column.name!r}; it has {', '.join(there)}. Say which of them it is:"
                f" columns={{{column.key!r}: ...}}"
            )
    if not _is_unique(inspector, table):
        raise SourceError(
            f"{what}: column {table.c.Id.name!r} is neither the primary key nor unique, so an id does not tell which"
            " row was taken over; make it unique first"
        )


def _is_unique(inspector: Inspector, table: Table) -> bool:
    sets: list[Sequence[str | None]] = [
        inspector.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"]
    ]
    sets += (one["column_names"] for one in inspector.get_unique_constraints(table.name, schema=table.schema))
    indexes = inspector.get_indexes(table.name, schema=table.schema)
    sets += (one["column_names"] for one in indexes if one["unique"])
    return any(list(columns) == [table.c.Id.name] for columns in sets)


class Reader:
    """Makes messages of a foreign table's rows.

    :param headers: how they are kept.
    :param destination_of: makes the destination of what the row has.
    :raises ValueError: no such way to keep headers.
    """

    def __init__(self, headers: HeaderFormat = "xml", destination_of: Callable[[str], str] = queue_of) -> None:
        if headers not in get_args(HeaderFormat):
            raise ValueError(f"headers={headers!r} must be one of {', '.join(get_args(HeaderFormat))}")
        self._format = headers
        self._destination_of = destination_of

    def message(self, row: Mapping[str, Any]) -> DelayedMessage:
        """Return the message of a row.

        :raises InvalidMessage: the row has something that no message of ours can have; the error names it.
        """
        destination = row["Destination"]
        if not isinstance(destination, str):
            raise InvalidMessage("destination", "is null or not text: there is nowhere to send it")
        return DelayedMessage(
            destination=self._destination_of(destination),
            body=_bytes("body", row["State"]),
            due_at=_time(row["Time"]),
            message_id=str(row["Id"]),
            headers=self._headers(_bytes("headers", row["Headers"])),
        )

    def _headers(self, data: bytes) -> dict[str, str]:
        if self._format == "xml":
            found = header_xml.read(data).items()
            return {key: value for key, value in found if value is not None and not key.startswith(_PROPERTIES)}
        return headers_of(data)


def retries_of(row: Mapping[str, Any]) -> int:
    """Return how often handing a row over has failed."""
    return min(row["RetryCount"], MAX_RETRY_COUNT) if isinstance(row["RetryCount"], int) else 0


def _bytes(column: str, value: object) -> bytes:
    if value is None:
        return b""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidMessage(column, f"must be bytes or text, not {type(value).__name__}")


def _time(value: object) -> datetime:
    if value is None:
        raise InvalidMessage("due_at", "is null: it says not when it is due")
    if isinstance(value, NoTime):
        raise InvalidMessage("due_at", "is not a time of the years 1 to 9999")
    moment = parse_time("due_at", value)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
