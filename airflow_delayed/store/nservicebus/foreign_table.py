"""A table of delayed messages that another store wrote: NServiceBus's, or one with other names. No Airflow here.

SqlServerDelayedMessageStore of NServiceBus.Transport.Msmq 2.0.7 (Sql/SqlConstants.cs) has the columns Id, Destination,
State (the body), Time (a datetime without a zone, in UTC), Headers (XML) and RetryCount. Id is MSMQ's own id of the
message (``{guid}\\{number}``); NServiceBus itself uses the id in the header ``NServiceBus.MessageId``. Both stay. As
NServiceBus does before it sends a row (MsmqMessageDispatcher.cs, ``DispatchDelayedMessage``), the reader leaves out
headers that begin with ``NServiceBus.Timeouts.Properties.``, which are its own, and headers that are null.

NServiceBus's MSMQ transport keeps the headers as XML, which its XmlSerializer wrote (MsmqUtilities.cs: ``Convert``
writes a List of HeaderInfo, and ``DeserializeMessageHeaders`` reads it)::

    <?xml version="1.0"?>
    <ArrayOfHeaderInfo xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" ...>
      <HeaderInfo>
        <Key>NServiceBus.MessageId</Key>
        <Value>...</Value>
      </HeaderInfo>
    </ArrayOfHeaderInfo>

As there: what follows the last end tag is ignored (old senders left null bytes), no bytes at all are no headers, a key
that is null is passed over, a key that occurs twice is an error, and a character that XML does not allow, such as
``&#x19;`` or ``&#x0;``, is read as what it stands for. Stricter than there: UTF-8 only, and nothing else may be among
the elements. A document type is refused before anything in it is looked at, so there are no entities to expand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, get_args
from xml.parsers import expat

from sqlalchemy import Column, Connection, Engine, Inspector, MetaData, Table, inspect
from sqlalchemy.types import NullType

from airflow_delayed.errors import InvalidMessage, SourceError, UnsupportedColumns
from airflow_delayed.message import UTC, DelayedMessage, parse_time
from airflow_delayed.store.dispatch.settle import MAX_RETRY_COUNT
from airflow_delayed.store.drivers import NoTime
from airflow_delayed.store.records import headers_of

#: How a foreign table keeps headers: NServiceBus's XML, or one JSON object of text by text; both as UTF-8.
HeaderFormat = Literal["xml", "json"]

NSERVICEBUS_COLUMNS = ("Id", "Destination", "State", "Time", "Headers", "RetryCount")
#: Columns that only a table of this package has.
_OURS = {"Digest", "DeliverConnId"}
#: MsmqUtilities.cs, PropertyHeaderPrefix.
_PROPERTIES = "NServiceBus.Timeouts.Properties."

_END = b"</ArrayOfHeaderInfo>"
_NIL = "http://www.w3.org/2001/XMLSchema-instance nil"
_TEXT = ("Key", "Value")
#: Which elements may be in which.
_IN = {(): ("ArrayOfHeaderInfo",), ("ArrayOfHeaderInfo",): ("HeaderInfo",), ("ArrayOfHeaderInfo", "HeaderInfo"): _TEXT}

#: Stands before the number of a character that XML does not allow, and doubled for itself: expat would refuse them.
_MARK = "\ue000"
_NOT_IN_XML = "\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff"
_HIDDEN = re.compile(f"[{_NOT_IN_XML}{_MARK}]|&#(?:x([0-9A-Fa-f]{{1,6}})|([0-9]{{1,7}}));")
_SHOWN = re.compile(f"{_MARK}(?:{_MARK}|([0-9a-f]+);)")
_FORBIDDEN = re.compile(f"[{_NOT_IN_XML}{_MARK}]")


def queue_of(destination: str) -> str:
    """Return the queue of an MSMQ address, ``Sales`` for ``Sales@SERVER1`` (MsmqAddress.cs, ``Parse``)."""
    return destination.partition("@")[0]


def foreign_table(
    engine: Engine, name: str, *, schema: str | None = None, columns: Mapping[str, str] | None = None
) -> Table:
    """Inspect a foreign table, and return it; its columns have NServiceBus's names as keys.

    :param columns: the names of columns that are named otherwise, by NServiceBus's name: ``{"Id": "message_id"}``.
    :raises ValueError: ``columns`` has a key that is no column of NServiceBus's table.
    :raises SourceError: the table does not exist, or its ids need not be unique, or it is a table of this package.
    :raises UnsupportedColumns: a column is missing.
    """
    names = {**dict(zip(NSERVICEBUS_COLUMNS, NSERVICEBUS_COLUMNS, strict=True)), **(columns or {})}
    if unknown := sorted(names.keys() - set(NSERVICEBUS_COLUMNS)):
        raise ValueError(f"columns= names {', '.join(unknown)}; it translates {', '.join(NSERVICEBUS_COLUMNS)}")
    table = Table(
        name,
        MetaData(),
        # no type: the driver's values as they are, so that an unreadable value fails its own row only
        *(Column(names[key], NullType(), key=key, quote=True) for key in NSERVICEBUS_COLUMNS),
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

        :raises InvalidMessage: the row has a value that a message cannot have; the error names it.
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
            found = read_headers_xml(data).items()
            return {key: value for key, value in found if value is not None and not key.startswith(_PROPERTIES)}
        return headers_of(data)


def retries_of(row: Mapping[str, Any]) -> int:
    """Return how often dispatching a row has failed."""
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


def read_headers_xml(data: bytes) -> dict[str, str | None]:
    """Return the headers; a value that is null is None.

    :raises InvalidMessage: it is something else than described above. The text shows nothing of the headers' values.
    """
    end = data.rfind(_END)
    data = data[: end + len(_END)] if end >= 0 else data.rstrip(b"\0")
    if not data:
        return {}
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _invalid_headers(f"are not UTF-8 at byte {error.start}") from None
    reader = _XmlHeaders()
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = _refuse
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    try:
        # as text, so that what the declaration says of the encoding does not matter
        parser.Parse(_HIDDEN.sub(_hide, text), True)
    except expat.ExpatError as error:
        problem = expat.ErrorString(error.code)
        raise _invalid_headers(f"are not XML: {problem}, line {error.lineno}, column {error.offset}") from None
    return reader.headers


def _invalid_headers(problem: str) -> InvalidMessage:
    return InvalidMessage("headers", problem)


def _refuse(*_: Any) -> None:
    raise _invalid_headers("have a document type, which NServiceBus never writes and which is not read")


def _hide(found: re.Match[str]) -> str:
    hexadecimal, decimal = found.groups()
    if hexadecimal or decimal:
        number = int(hexadecimal, 16) if hexadecimal else int(decimal)
        if number > 0x10FFFF or not _FORBIDDEN.match(chr(number)):
            return found[0]  # what is wrong with it, expat tells
        return _hidden(chr(number))
    return _hidden(found[0])


def _hidden(character: str) -> str:
    return _MARK + (_MARK if character == _MARK else f"{ord(character):x};")


def _show(found: re.Match[str]) -> str:
    return chr(int(found[1], 16)) if found[1] else _MARK


class _XmlHeaders:
    """Takes elements and text one after the other."""

    def __init__(self) -> None:
        self.headers: dict[str, str | None] = {}
        self._path: tuple[str, ...] = ()
        self._pair: dict[str, str | None] = {}
        self._nil = False
        self._text: list[str] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name not in _IN.get(self._path, ()):
            raise _invalid_headers(f"have an element {name[:40]!r} where there is none in an ArrayOfHeaderInfo")
        if name in self._pair:
            raise _invalid_headers(f"have a second {name} in one HeaderInfo")
        self._path += (name,)
        self._nil = attributes.get(_NIL) in ("true", "1")
        self._text.clear()

    def text(self, data: str) -> None:
        if self._path[-1] in _TEXT:
            self._text.append(data)
        elif data.strip():
            raise _invalid_headers("have text between the elements of an ArrayOfHeaderInfo")

    def end(self, name: str) -> None:
        self._path = self._path[:-1]
        if name in _TEXT:
            self._pair[name] = None if self._nil else _SHOWN.sub(_show, "".join(self._text))
        elif name == "HeaderInfo":
            self._add(self._pair.get("Key"), self._pair.get("Value"))
            self._pair = {}

    def _add(self, key: str | None, value: str | None) -> None:
        if key is None:
            return
        if key in self.headers:
            raise _invalid_headers(f"have {key[:80]!r} twice")
        self.headers[key] = value
