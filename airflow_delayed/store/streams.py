"""The streams that tasks run to their end: who runs each, and which query its checkpoint is of; table ``_streams``.

Each function works within the caller's transaction, and by the database's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any

from sqlalchemy import Connection, select

from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.records import insert_new_rows
from airflow_delayed.store.schema import Tables

#: How long a lease holds without being renewed.
STREAM_LEASE = timedelta(seconds=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecord:
    """What the store knows of a stream.

    :param restarts: how often it was restarted; each restart begins another checkpoint.
    :param query: the id of Spark's query; None: no checkpoint has been seen yet.
    :param fingerprint: of what the query reads and does.
    """

    restarts: int
    query: str | None
    fingerprint: bytes | None


def take(connection: Connection, tables: Tables, stream: str, holder: str) -> StreamRecord | None:
    """Take the lease of a stream, which is known from then on; None: another holder has it."""
    now, key = database_time(connection), _key(stream)
    insert_new_rows(connection, tables.streams, [{"Id": key, "Name": stream, "Restarts": 0, "At": now}])
    row = _locked(connection, tables, key)
    if row is None or (row.HeldUntil is not None and row.HeldUntil > now and row.Holder != holder):
        return None
    _write(connection, tables, key, Holder=holder, HeldUntil=now + STREAM_LEASE)
    fingerprint = None if row.Fingerprint is None else bytes(row.Fingerprint)
    return StreamRecord(restarts=row.Restarts, query=row.Query, fingerprint=fingerprint)


def renew(connection: Connection, tables: Tables, stream: str, holder: str) -> bool:
    """Renew a lease; False: it is another's by now."""
    now, key = database_time(connection), _key(stream)
    row = _locked(connection, tables, key)
    if row is None or row.Holder != holder:
        return False
    _write(connection, tables, key, HeldUntil=now + STREAM_LEASE)
    return True


def release(connection: Connection, tables: Tables, stream: str, holder: str, seen: StreamRecord) -> None:
    """End a lease, and note which query the checkpoint is of."""
    key = _key(stream)
    row = _locked(connection, tables, key)
    if row is not None and row.Holder == holder and row.Restarts == seen.restarts:
        _write(connection, tables, key, Holder=None, HeldUntil=None, Query=seen.query, Fingerprint=seen.fingerprint)


def restart(connection: Connection, tables: Tables, stream: str) -> bool:
    """Let a stream begin with a new checkpoint; False: the store does not know it, or somebody runs it now."""
    now, key = database_time(connection), _key(stream)
    row = _locked(connection, tables, key)
    if row is None or (row.HeldUntil is not None and row.HeldUntil > now):
        return False
    _write(connection, tables, key, Restarts=row.Restarts + 1, Query=None, Fingerprint=None, At=now)
    return True


def _key(stream: str) -> str:
    # a URL is too long for an index
    return blake2b(stream.encode(), digest_size=16).hexdigest()


def _locked(connection: Connection, tables: Tables, key: str) -> Any:
    table = tables.streams
    statement = select(table).where(table.c.Id == key).with_for_update()
    return connection.execute(dialect_of(connection).by_key(statement, table)).one_or_none()


def _write(connection: Connection, tables: Tables, key: str, **values: object) -> None:
    connection.execute(tables.streams.update().where(tables.streams.c.Id == key).values(values))
