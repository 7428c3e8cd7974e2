"""NServiceBus's own: the table of SqlServerDelayedMessageStore, and the headers that its MSMQ transport writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import Column, DateTime, Engine, Index, Integer, LargeBinary, MetaData, String, Table, insert, text
from sqlalchemy.dialects import mysql

_ESCAPED = re.compile("[&<>\x00-\x08\x0b\x0c\x0e-\x1f]")
_NAMED = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def headers_xml(headers: Mapping[str, str | None]) -> bytes:
    """Write headers as .NET's XmlSerializer does on an XmlTextWriter: a value that is null has no element."""
    lines = [
        '<?xml version="1.0"?>',
        '<ArrayOfHeaderInfo xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"'
        ' xmlns:xsd="http://www.w3.org/2001/XMLSchema">',
    ]
    for key, value in headers.items():
        lines += ["  <HeaderInfo>", f"    {_element('Key', key)}"]
        lines += [] if value is None else [f"    {_element('Value', value)}"]
        lines.append("  </HeaderInfo>")
    return "\r\n".join([*lines, "</ArrayOfHeaderInfo>"]).encode()


def _element(name: str, text: str) -> str:
    escaped = _ESCAPED.sub(lambda found: _NAMED.get(found[0], f"&#x{ord(found[0]):X};"), text)
    return f"<{name}>{escaped}</{name}>" if text else f"<{name} />"


def timeouts_table(name: str, schema: str | None, **names: str) -> Table:
    """The seed's table (SqlConstants.cs), or one with other names, which are given by the seed's."""

    def column(key: str, kind: Any, **options: Any) -> Column[Any]:
        return Column(names.get(key, key), kind, key=key, quote=True, **options)

    return Table(
        name,
        MetaData(),
        column("Id", String(250), primary_key=True),
        column("Destination", String(200)),
        column("State", LargeBinary()),
        column("Time", DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql")),
        column("Headers", LargeBinary(), nullable=False),
        column("RetryCount", Integer(), nullable=False, server_default=text("0")),
        Index(f"Index_{names.get('Time', 'Time')}", "Time"),
        schema=schema,
        quote=True,
        quote_schema=True,
    )


def fill(engine: Engine, table: Table, rows: Iterable[Mapping[str, Any]]) -> None:
    with engine.begin() as connection:
        connection.execute(insert(table), list(rows))


def row(name: str, due_at: datetime, headers: Mapping[str, str | None] | None = None, **columns: Any) -> dict[str, Any]:
    """A row as .NET stores it: MSMQ's address, its time as bare UTC, the transport's own properties in the headers."""
    message_headers = {
        "NServiceBus.MessageId": f"logical-{name}",
        "NServiceBus.EnclosedMessageTypes": "Acme.Reminder, Acme.Messages",
        **(headers or {}),
        "NServiceBus.Timeouts.Properties.NServiceBus.Timeout.Destination": "Sales@SERVER1",
        "NServiceBus.Timeouts.Properties.NServiceBus.Timeout.Expire": "2030-01-01 00:00:00:000000 Z",
        "CorrId": "",
    }
    return {
        "Id": name,
        "Destination": "Sales@SERVER1",
        "State": b"body of " + name.encode(),
        "Time": due_at.astimezone(timezone.utc).replace(tzinfo=None),
        "Headers": headers_xml(message_headers),
        "RetryCount": 0,
        **columns,
    }
