"""One message of a store: its row, the SQL that inserts, finds and deletes rows by id, and the record that users see.

Each function with a connection works within the caller's transaction.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Select, Table, func, null, select

from airflow_delayed.delivery import BatchBounds
from airflow_delayed.errors import InvalidMessage, LimitExceeded, WrongToken
from airflow_delayed.fields import FIELD_COLUMNS, FIELD_NAMES, FIELDS, MAX_TAG
from airflow_delayed.identity import Origin, digest_of
from airflow_delayed.message import DelayedMessage, check_text, from_microseconds, microseconds
from airflow_delayed.store.database import slices
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.filters import MessageState, claimed_until, failed_state, state_of
from airflow_delayed.store.policy import MAX_DESTINATION, MAX_QUEUE_NAME
from airflow_delayed.store.schema import MAX_BODY, MAX_HEADER_BYTES, Tables, Where

#: The name in the JSON of the column Headers under which the headers of the trace are. No header has an empty name, so
#: no user's header is there.
_TRACE = ""
#: ``json.dumps`` would make an encoder for each message.
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
#: The columns that a list reads, of the tables of messages and of failed messages.
SHOWN = (
    *FIELD_COLUMNS.values(),
    "Id",
    "Destination",
    "Time",
    "DeliverConnId",
    "RetryCount",
    "StoredAt",
    "NextTry",
    "LastError",
    "ReplacedAt",
)
_COLUMNS = tuple(FIELD_COLUMNS.values())
_optional, _columns = attrgetter(*FIELD_NAMES), itemgetter(*_COLUMNS)
#: Optional fields that are texts, and their most characters.
_TEXTS = [(field.name, field.length) for field in FIELDS if field.type is str]
#: Headers of more bytes are not read.
SHOWN_HEADERS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """A message in the store, without headers and body."""

    message_id: str
    destination: str
    due_at: datetime
    state: MessageState
    #: The connection that delivers it; None: the destination is a queue table in the same database.
    deliver_conn_id: str | None
    tag: str | None
    expires_at: datetime | None
    #: How often dispatching it failed.
    retry_count: int
    #: After a failure: the earliest time of the next attempt.
    next_try: datetime | None
    #: The last failure; never a body or a header's value.
    last_error: str | None
    #: By the database's clock, as the two below. A message that replaced another has the other's time.
    stored_at: datetime | None
    #: When it was given up, or moved because it had expired.
    failed_at: datetime | None
    #: When it replaced another message of its id; None: never.
    replaced_at: datetime | None = None
    #: The run of the task that stored it; None: unknown, or not stored by a task.
    origin: Origin | None = None
    #: No dispatcher takes it before it is due.
    until_due: bool = False

    @property
    def token(self) -> str:
        """The place of this message: ``list(after=token)`` continues behind it."""
        return token_of(self.due_at, self.message_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """An id whose message has left the store."""

    message_id: str
    #: "dispatched", "cancelled", "purged" or "erased".
    state: str
    #: When the id got this state, or was claimed for dispatch.
    at: datetime
    #: None after an erasure, as is ``due_at``.
    destination: str | None
    due_at: datetime | None
    #: The dispatcher, as its lease named it; None if it was cancelled, purged or erased.
    dispatcher: str | None = None
    tag: str | None = None
    #: None as well for a queue table in the same database.
    deliver_conn_id: str | None = None
    #: The run of the task that stored it; None as well once the run is forgotten.
    origin: Origin | None = None
    #: A cancelled message can be restored until then; None: it cannot.
    restorable_until: datetime | None = None

    @property
    def token(self) -> str:
        """The place of this record in a list by time, the last one first."""
        return token_of(self.at, self.message_id)


def token_of(due_at: datetime, message_id: str) -> str:
    """Return a place in the order of a time and id as a text."""
    return urlsafe_b64encode(f"{microseconds(due_at)} {message_id}".encode()).decode().rstrip("=")


def place_of(token: str) -> tuple[datetime, str]:
    """Return due time and id of a token, or raise WrongToken."""
    try:
        due, _, message_id = urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode().partition(" ")
        return from_microseconds(int(due)), message_id
    except (ValueError, OverflowError):
        raise WrongToken("after= is no token of a listed message; give the .token of the last one") from None


def columns(tables: Tables, where: Where, *, leased: bool = True) -> Sequence[ColumnElement[Any]]:
    """Return the columns that a list reads of a row; ``leased``: dispatchers can have leases of the rows."""
    table = tables.of(where)
    shown = [table.c[name] for name in SHOWN]
    if where == "failed":
        return [*shown, table.c.Reason, table.c.FailedAt]
    lease = claimed_until(tables) if leased else null()
    return [*shown, lease.label("ClaimedUntil"), null().label("FailedAt")]


def of_runs(tables: Tables) -> Sequence[ColumnElement[Any]]:
    """Return the columns that a list reads of a run."""
    return [tables.runs.c[name] for name in ("DagId", "RunId", "TaskId", "MapIndex", "Iteration")]


def stored(row: Sequence[Any], where: Where, now: datetime, origin: Origin | None = None) -> StoredMessage:
    """Return the message of a row of :func:`columns` and maybe :func:`of_runs`; without those it is of ``origin``."""
    # by position: access by name takes longer than everything else here
    (
        message_id,
        destination,
        due_at,
        deliver_conn_id,
        retry_count,
        stored_at,
        next_try,
        last_error,
        replaced_at,
        stands,
        failed_at,
        *of_run,
    ) = row[len(FIELD_NAMES) :]
    optional = dict(zip(FIELD_NAMES, row, strict=False))
    if where == "failed":
        state = failed_state(stands)
    else:
        timed = {"Time": due_at, "ExpiresAt": optional["expires_at"], "NextTry": next_try, "ClaimedUntil": stands}
        state = state_of({**timed, "RetryCount": retry_count}, now)
    # a message that stays in the store until it is due has its first try then
    until_due = next_try == due_at and not retry_count
    return StoredMessage(
        message_id=message_id,
        destination=destination,
        due_at=due_at,
        state=state,
        deliver_conn_id=deliver_conn_id,
        **optional,
        retry_count=retry_count,
        next_try=None if until_due else next_try,
        until_due=until_due,
        last_error=last_error,
        stored_at=stored_at,
        failed_at=failed_at,
        replaced_at=replaced_at,
        origin=origin_of(*of_run) if of_run and of_run[0] is not None else origin,
    )


@lru_cache(maxsize=1024)
def origin_of(dag_id: str, run_id: str, task_id: str, map_index: int, iteration: int | None) -> Origin:
    """Return the run of a row of :func:`of_runs`; many messages in a list come from the same."""
    return Origin(dag_id=dag_id, run_id=run_id, task_id=task_id, map_index=map_index, iteration=iteration)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The headers of a message in the store, and the beginning of its body."""

    #: None: over a million bytes, or no JSON object of text.
    headers: Mapping[str, str] | None
    #: At most ``body_limit`` bytes.
    body: bytes
    #: Bytes of the whole body.
    body_bytes: int

    def __repr__(self) -> str:
        # headers and body must not get into a log
        return f"Content({len(self.headers or ())} headers, body_bytes={self.body_bytes})"


def read_content(engine: Engine, tables: Tables, message_id: str, *, body_limit: int) -> Content | None:
    """Return the content of a message, or of a cancelled message that can be restored; None: it is not in the store."""
    # a message that moves from one table to the other between two queries is found by the second round
    for _ in range(2):
        for table in (tables.messages, tables.failed, tables.cancelled):
            with engine.connect().execution_options(read_only=True) as connection:
                kept = [table.c.Until > database_time(connection)] if table is tables.cancelled else []
                if found := _read(connection, table, message_id, body_limit, kept):
                    return found
    return None


def _read(
    connection: Connection, table: Table, message_id: str, body_limit: int, kept: Sequence[ColumnElement[bool]]
) -> Content | None:
    dialect = dialect_of(connection)
    statement = select(
        dialect.length(table.c.Headers).label("headers_bytes"),
        dialect.beginning(table.c.Headers, SHOWN_HEADERS).label("headers"),
        dialect.length(table.c.State).label("body_bytes"),
        dialect.beginning(table.c.State, body_limit).label("body"),
    ).where(table.c.Id == message_id, *kept)
    row = connection.execute(statement).one_or_none()
    if row is None:
        return None
    whole = row.headers_bytes <= SHOWN_HEADERS
    return Content(
        # on SQLite the beginning of an empty value is null
        headers=_headers(bytes(row.headers or b"")) if whole else None,
        body=bytes(row.body or b""),
        body_bytes=int(row.body_bytes),
    )


def _headers(data: bytes) -> Mapping[str, str] | None:
    try:
        found = headers_of(data)
        if isinstance(found.get(_TRACE), dict):
            found = {**found.pop(_TRACE), **found}
        for text in (*found, *found.values()):
            if not isinstance(text, str):
                return None
            check_text("headers", text)
    except InvalidMessage:
        return None
    return found


def check_limits(message: DelayedMessage) -> None:
    """Check a message against the store's columns, and the limits of a dispatcher.

    :raises LimitExceeded: the destination has over 200 characters, the tag over 250, or the body over 128 MiB.
    :raises InvalidMessage: destination or tag has a null character.
    """
    _check_text("destination", message.destination, MAX_DESTINATION)
    for name, length in _TEXTS:
        if (text := getattr(message, name)) is not None:
            _check_text(name, text, length)
    _check_size("body", message.body, MAX_BODY)


def within_bounds(extremes: BatchBounds, *, queue_tables: bool) -> bool:
    """Return whether all messages within these bounds can be stored; False if that is not certain."""
    if extremes.longest_tag > MAX_TAG or extremes.null_in_tag:
        return False
    return all(
        len(name) <= MAX_DESTINATION and "\0" not in name and (not queue_tables or len(name.encode()) <= MAX_QUEUE_NAME)
        for name in extremes.destinations
    )


def _check_size(column: str, value: bytes, limit: int) -> None:
    if len(value) > limit:
        raise LimitExceeded(
            column,
            f"has {len(value):,} bytes, and a dispatcher reads up to {limit:,}; keep the content elsewhere and send"
            " where it is",
        )


def check_queue_name(name: str) -> None:
    """Check that a destination can be the name of a queue table."""
    if len(name.encode()) > MAX_QUEUE_NAME:
        raise LimitExceeded(
            "destination", f"has {len(name.encode())} bytes; the name of a table has up to {MAX_QUEUE_NAME}"
        )


def _check_text(column: str, value: str, limit: int) -> None:
    if len(value) > limit:
        raise LimitExceeded(column, f"has {len(value)} characters; the store keeps up to {limit}")
    if "\0" in value:
        raise InvalidMessage(column, "has a null character, which not every database keeps as text")


def to_row(message: DelayedMessage, deliver_conn_id: str | None, run: int | None = None) -> dict[str, Any]:
    """Return the row of a message, without StoredAt; ``run`` is the number of the task's run that sends it."""
    check_limits(message)
    headers = _JSON(dict(message.headers)).encode() if message.headers else b"{}"
    _check_size("headers", headers, MAX_HEADER_BYTES)
    if message.trace:
        traced = _JSON({**message.headers, _TRACE: dict(message.trace)}).encode()
        headers = traced if len(traced) <= MAX_HEADER_BYTES else headers
    row = {
        "Id": message.message_id,
        "Destination": message.destination,
        "State": message.body,
        "Time": message.due_at,
        "Headers": headers,
        "RetryCount": 0,
        "DeliverConnId": deliver_conn_id,
        "Digest": digest_of(message),
        "Run": run,
    }
    row.update(zip(_COLUMNS, _optional(message), strict=True))
    return row


#: The reason of a row that cannot be read.
UNREADABLE_HEADERS = "are not a JSON object in UTF-8"


def headers_of(data: bytes) -> dict[str, Any]:
    """Return the JSON object in a column of headers, with values of any type, or raise InvalidMessage."""
    try:
        # decoded here, because json.loads first guesses the encoding of bytes
        headers = json.loads(data.decode())
    except (ValueError, RecursionError):
        headers = None
    if not isinstance(headers, dict):
        raise InvalidMessage("headers", UNREADABLE_HEADERS)
    return headers


def to_message(row: Mapping[str, Any]) -> DelayedMessage:
    """Return the message of a row; InvalidMessage: another program wrote it, and it cannot be sent or is too large."""
    if row["State"] is None:
        raise LimitExceeded(
            "body",
            f"has {row['BodyBytes']:,} bytes and the headers {row['HeadersBytes']:,}, too many to be read; a dispatcher"
            f" reads up to {MAX_BODY:,} and {MAX_HEADER_BYTES:,}; send where the content is, in its place",
        )
    given = bytes(row["Headers"])
    headers: dict[str, Any] = {}
    trace = None
    if given != b"{}":
        headers = headers_of(given)
        trace = headers.pop(_TRACE) if isinstance(headers.get(_TRACE), dict) else None
    return DelayedMessage(
        destination=row["Destination"],
        body=bytes(row["State"]),
        due_at=row["Time"],
        message_id=row["Id"],
        headers=headers,
        **dict(zip(FIELD_NAMES, _columns(row), strict=True)),
        trace=trace,
    )


def insert_rows(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows whose ids are not there yet, else IntegrityError; half the time of :func:`insert_new_rows`."""
    dialect_of(connection).insert_all(connection, table, rows)


def insert_new_rows(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Insert the rows whose ids are not there yet, each once in ``rows``, and return their ids."""
    return dialect_of(connection).insert_new(connection, table, rows) if rows else set()


def present_rows(
    connection: Connection, table: Table, ids: Sequence[str], *, lock: bool = False
) -> dict[str, tuple[bytes | None, str | None]]:
    """Return digest and delivering connection by id, of the rows that are there; ``lock`` waits for them."""
    there: dict[str, tuple[bytes | None, str | None]] = {}
    dialect = dialect_of(connection)
    for some in dialect.portions(ids):
        known = dialect.among(table.c.Id, some)
        statement: Select[Any] = select(table.c.Id, table.c.Digest, table.c.DeliverConnId).where(known)
        if lock:
            statement = dialect.by_key(statement.order_by(table.c.Id).with_for_update(), table)
        for row in connection.execute(statement):
            there[row.Id] = (None if row.Digest is None else bytes(row.Digest), row.DeliverConnId)
    return there


def delivered_by(table: Table, deliver_conn_id: str | None) -> ColumnElement[bool]:
    """Return the condition for messages that this connection delivers; None: messages for queue tables."""
    if deliver_conn_id is None:
        return table.c.DeliverConnId.is_(None)
    return table.c.DeliverConnId == deliver_conn_id


def remove_rows(connection: Connection, table: Table, ids: Sequence[str]) -> None:
    """Delete rows that this transaction has locked."""
    dialect = dialect_of(connection)
    for some in slices(ids):
        connection.execute(dialect.delete_rows(table.c.Id, some))


def count_rows(connection: Connection, table: Table, *conditions: ColumnElement[bool]) -> int:
    """Count rows."""
    return int(connection.execute(select(func.count()).select_from(table).where(*conditions)).scalar_one())
