"""A dispatcher's reports: the counts of a run, their log lines, the error of a failed run, and its heartbeat."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from airflow_delayed.errors import DelayedError, TransportUnavailable, some
from airflow_delayed.message import UTC
from airflow_delayed.reports import EARLIEST, LATEST, Counts, counts_text, due_span, in_brackets, largest_first
from airflow_delayed.store.dialects import dialect_of
from airflow_delayed.store.dispatch.settle import BatchOutcome, shortened
from airflow_delayed.store.schema import Tables

log = logging.getLogger(__name__)

#: How long a run of a dispatcher is kept after its last heartbeat.
DISPATCHERS_KEPT = timedelta(days=1)
#: Seconds between two heartbeats of a dispatcher in the store.
HEARTBEAT = 3.0
#: Without a heartbeat for this long a dispatcher does not work.
DISPATCHER_SILENT = timedelta(seconds=3 * HEARTBEAT)
#: How many runs of dispatchers are read at most, and how many characters of each JSON text of theirs: anybody with the
#: right to INSERT can write more.
MOST_RUNS = 1000
_MOST_CHARACTERS = 16_384
#: The most troubles that a heartbeat names, and characters of the reason of each.
MOST_TROUBLES, _MOST_OF_REASON = 20, 300


@dataclass(slots=True)
class DispatchReport(Counts):
    """Counts of one run.

    ``dispatched`` messages were sent, and ``error_destination`` messages were given up and sent there; both are
    removed. ``retried`` counts failed attempts that are followed by another. ``failed`` messages are given up,
    ``expired`` messages were not sent in time, and both are moved to the table of failed messages. ``forgotten`` ids
    are remembered no longer. ``left_to_others`` messages are due within the lookahead, for connections that are not on
    the dispatcher's list.
    """

    dispatched: int = 0
    retried: int = 0
    failed: int = 0
    expired: int = 0
    error_destination: int = 0
    forgotten: int = 0
    left_to_others: int = 0
    by_connection: dict[str, int] = field(default_factory=dict)
    first_due: datetime | None = field(default=None, metadata=EARLIEST)
    last_due: datetime | None = field(default=None, metadata=LATEST)

    def add_all(self, conn_id: str, count: int, first_due: datetime, last_due: datetime) -> None:
        """Count messages that were dispatched and removed."""
        self.dispatched += count
        self.by_connection[conn_id] = self.by_connection.get(conn_id, 0) + count
        self.first_due = min(self.first_due or first_due, first_due)
        self.last_due = max(self.last_due or last_due, last_due)

    def __str__(self) -> str:
        connections = in_brackets(largest_first(self.by_connection))
        line = f"{self.dispatched:,} messages dispatched{connections}{due_span(self.first_due, self.last_due)}"
        others = {
            "retried": self.retried,
            "failed": self.failed,
            "expired": self.expired,
            "sent to the error destination": self.error_destination,
            "left to other dispatchers": self.left_to_others,
            "ids forgotten": self.forgotten,
        }
        return line + counts_text(others)


class BreakerTripped(TransportUnavailable):
    """Work in the store has failed for too long, or too often. Messages that were not dispatched are still there."""


class DispatchFailed(DelayedError):
    """A run could not dispatch all messages.

    ``failures`` has a reason by message id for messages that were given up and are now in the table of failed messages,
    the first thousand of them; ``unavailable`` has a reason for each connection that failed until its breaker tripped,
    whose messages are as they were. Messages that only wait for their next try do not fail a run.
    """

    def __init__(
        self,
        conn_id: str,
        report: DispatchReport,
        failures: Mapping[str, str],
        unavailable: Mapping[str, str],
        kept: str = "in the table of failed messages; retry them when the cause is gone",
    ) -> None:
        cases = [f"connection {name!r} is not available: {reason}" for name, reason in unavailable.items()]
        cases += [" ".join(f"message {message_id}: {reason}".split()) for message_id, reason in failures.items()]
        advice = []
        if report.failed:
            advice.append(f"The {report.failed:,} are {kept}")
        if unavailable:
            advice.append(
                "What waits for a connection is still in the store, and is dispatched by the next run when the cause is"
                " repaired"
            )
        super().__init__(
            f"store {conn_id!r}: {report.dispatched:,} messages were dispatched, {report.failed:,} failed,"
            f" {len(unavailable)} connections are not available: {some(cases)}. {'. '.join(advice)}"
        )
        self.report = report
        self.failures = dict(failures)
        self.unavailable = dict(unavailable)


#: Gets a connection and the outcome of one of its batches, in the thread that settled it.
Meter = Callable[[str, BatchOutcome], object]
#: Seconds after the last attempt for which it is a trouble of the present that all messages of a destination fail.
FAILING_FOR = 10.0
#: The most reasons in the error of a run.
KEPT_REASONS = 1000


@dataclass(slots=True)
class _Failures:
    since: datetime
    #: The next attempt of the last message, or when it was given up.
    last: datetime
    reason: str
    first_id: str
    #: More than one message has failed: it is not that message alone.
    several: bool = False


class DispatchCounter:
    """Counts the outcomes of the messages of one connection, and logs failures."""

    def __init__(self, conn_id: str, *meters: Meter) -> None:
        self.report = DispatchReport()
        self.failures: dict[str, str] = {}
        self.conn_id = conn_id
        self._meters = meters
        #: By destination.
        self._failing: dict[str, _Failures] = {}

    def take(self) -> tuple[DispatchReport, dict[str, str]]:
        """Return the counts and the reasons of given-up messages, and reset both."""
        taken = self.report, self.failures
        self.report, self.failures = DispatchReport(), {}
        return taken

    def count(self, outcome: BatchOutcome) -> None:
        """Count the messages of a settled batch."""
        report = self.report
        if outcome.delivered:
            dues = [row["Time"] for row in outcome.delivered]
            report.add_all(self.conn_id, len(dues), min(dues), max(dues))
        report.retried += len(outcome.retry)
        report.failed += len(outcome.failed)
        report.expired += len(outcome.expired)
        report.error_destination += len(outcome.dead_lettered)
        for row, reason in outcome.failed[: KEPT_REASONS - len(self.failures)]:
            self.failures[row["Id"]] = reason

    def add(self, outcome: BatchOutcome) -> None:
        """Count the messages of a settled batch, in the metrics too, and log what went wrong."""
        for meter in self._meters:
            meter(self.conn_id, outcome)
        self.count(outcome)
        # what was not tried has no time
        if outcome.at is not None and (self._failing or outcome.retry or outcome.failed):
            self._note_failures(outcome, outcome.at)
        if outcome.retry:
            first = min(outcome.retry, key=lambda planned: planned.next_try)
            self._warn(
                f"{len(outcome.retry):,} messages are tried again, the first at {first.next_try:%H:%M:%S} UTC:"
                f" {shortened(first.row['Id'])}: {first.reason}"
            )
        if outcome.dead_lettered:
            self._warn(
                f"{len(outcome.dead_lettered):,} messages went to the error destination, such as"
                f" {shortened(outcome.dead_lettered[0]['Id'])}"
            )
        if outcome.failed:
            row, reason = outcome.failed[0]
            self._warn(f"{len(outcome.failed):,} messages are given up, such as {shortened(row['Id'])}: {reason}")

    def failing(self, conn_id: str | None, now: datetime) -> dict[str, Trouble]:
        """Return by name the destinations of which all messages fail, several of them; from any thread."""
        return {
            name: Trouble(
                kind=TroubleKind.FAILING, conn_id=conn_id, destination=name, since=one.since, reason=one.reason
            )
            for name, one in list(self._failing.items())
            if one.several and (now - one.last).total_seconds() < FAILING_FOR
        }

    def _note_failures(self, outcome: BatchOutcome, now: datetime) -> None:
        delivered = {row["Destination"] for row in outcome.removed}
        for name in delivered & self._failing.keys():
            del self._failing[name]
        failed = [(one.row, one.reason, one.next_try) for one in outcome.retry if one.counted]
        failed += [(row, reason, now) for row, reason in outcome.failed]
        for row, reason, last in failed:
            if (name := row["Destination"]) in delivered:
                continue
            one = self._failing.setdefault(name, _Failures(now, last, reason, row["Id"]))
            one.last, one.reason = max(one.last, last), reason
            one.several = one.several or row["Id"] != one.first_id

    def _warn(self, text: str) -> None:
        log.warning("connection %r: %s", self.conn_id, text)


class TroubleKind(str, Enum):
    """What a dispatcher cannot do at present."""

    #: Send anything through a connection.
    CONNECTION = "connection"
    #: Send to a destination that takes no messages: its queue is full, or confirms nothing, or its table is locked.
    REFUSED = "refused"
    #: Send to a destination that is not there, or that the login has no right to; its messages are given up.
    MISSING = "missing"
    #: Send any message to a destination; each has a reason of its own, and is tried again or given up.
    FAILING = "failing"
    #: Work in the store's database.
    DATABASE = "database"
    #: Send and settle messages before their leases end.
    LEASES = "leases"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What a dispatcher cannot do, with its reason, which has no secret but may name hosts and users.

    :param conn_id: the connection; None: the queue tables of the store's own database.
    :param destination: None: all of the connection.
    :param since: by the database's clock.
    """

    kind: TroubleKind
    conn_id: str | None = None
    destination: str | None = None
    since: datetime
    reason: str

    def __str__(self) -> str:
        of = f"destination {self.destination!r}: " if self.destination is not None else ""
        where = f"connection {self.conn_id!r}: " if self.conn_id is not None else ""
        return f"{where}{of}{self.reason} (since {self.since:%Y-%m-%d %H:%M:%S} UTC)"


def record_heartbeat(
    connection: Connection,
    tables: Tables,
    dispatcher: str,
    deliver_conn_ids: Sequence[str | None],
    now: datetime,
    *,
    worked_at: datetime | None = None,
    troubles: Sequence[Trouble] = (),
    host: str | None = None,
    dag_id: str | None = None,
    lookaheads: Mapping[str, timedelta] | None = None,
    stays: bool = False,
    ended: bool = False,
) -> None:
    """Write that a dispatcher is at work, or has ended; delete runs without a heartbeat for more than a day.

    :param deliver_conn_ids: the connections that it delivers through; None stands for the queue tables of the store's
        own database.
    :param worked_at: when it last claimed, settled or delivered messages.
    :param troubles: what it cannot do now; the first 20 are written.
    :param lookaheads: by connection how long before its due time it takes a message.
    """
    table = tables.dispatchers
    values: dict[str, Any] = {"SeenAt": now, "EndedAt": now if ended else None, "WorkedAt": worked_at}
    values |= {"Troubles": _json_of_troubles(troubles) if troubles else None, "Host": host, "DagId": dag_id}
    reaches = {name: [ahead.total_seconds(), stays] for name, ahead in (lookaheads or {}).items()}
    values["Reaches"] = None if lookaheads is None else json.dumps(reaches, ensure_ascii=False)
    if not connection.execute(update(table).where(table.c.Id == dispatcher).values(**values)).rowcount:
        names = json.dumps(list(deliver_conn_ids), ensure_ascii=False)
        connection.execute(insert(table).values(Id=dispatcher, ConnIds=names, StartedAt=now, **values))
    connection.execute(delete(table).where(table.c.SeenAt < now - DISPATCHERS_KEPT))


def _json_of_troubles(troubles: Sequence[Trouble]) -> str:
    written = [
        {
            "kind": one.kind.value,
            "conn_id": one.conn_id,
            "destination": one.destination,
            "since": one.since.isoformat(),
            "reason": shortened(one.reason)[:_MOST_OF_REASON],
        }
        for one in troubles[:MOST_TROUBLES]
    ]
    return json.dumps(written, ensure_ascii=False)


def troubles_column(connection: Connection, tables: Tables) -> ColumnElement[str]:
    """Return the column of a dispatcher's troubles, for :func:`troubles_in`."""
    return dialect_of(connection).beginning(tables.dispatchers.c.Troubles, _MOST_CHARACTERS)


def troubles_in(text: str | None) -> tuple[Trouble, ...]:
    """Return the troubles in a JSON text; none if anybody else has written it, or it was cut off."""
    try:
        return tuple(_trouble_of(one) for one in json.loads(text or "[]")[:MOST_TROUBLES])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return ()


def _trouble_of(written: Mapping[str, Any]) -> Trouble:
    names = written["conn_id"], written["destination"]
    if not all(one is None or isinstance(one, str) for one in names):
        raise ValueError("a name is no text")
    since = datetime.fromisoformat(written["since"]).astimezone(UTC)
    reason = shortened(str(written["reason"]))[:_MOST_OF_REASON]
    kind = TroubleKind(written["kind"])
    return Trouble(kind=kind, conn_id=names[0], destination=names[1], since=since, reason=reason)


def last_seen(connection: Connection, tables: Tables, deliver_conn_id: str | None) -> datetime | None:
    """Return when a dispatcher was last at work for a connection, or None if none was for about a day."""
    table = tables.dispatchers
    # as JSON has the name; other texts that contain it are left out below
    name = table.c.ConnIds.contains(json.dumps(deliver_conn_id, ensure_ascii=False), autoescape=True)
    statement = select(names_column(connection, tables), table.c.SeenAt).where(name).order_by(table.c.SeenAt.desc())
    for text, moment in connection.execute(statement.limit(MOST_RUNS)):
        if deliver_conn_id in connection_names(text):
            last: datetime = moment
            return last
    return None


def lookaheads(connection: Connection, tables: Tables) -> dict[str | None, timedelta]:
    """Return by connection how long before its due time a dispatcher of the last day takes a message at most.

    None stands for the queue tables of the store's own database, whose messages are taken when they are due.
    """
    found: dict[str | None, timedelta] = {}
    table = tables.dispatchers
    text = dialect_of(connection).beginning(table.c.Reaches, _MOST_CHARACTERS)
    written = select(text).where(table.c.Reaches.is_not(None)).distinct().limit(MOST_RUNS)
    for reaches in connection.execute(written).scalars():
        for name, (ahead, _) in _reaches_in(reaches).items():
            found[name] = max(found.get(name, timedelta(0)), ahead)
    return {**found, None: timedelta(0)}


def staying(connection: Connection, tables: Tables, now: datetime) -> set[str]:
    """Return the connections for which a dispatcher is at work that stays."""
    table = tables.dispatchers
    text = dialect_of(connection).beginning(table.c.Reaches, _MOST_CHARACTERS)
    at_work = (
        table.c.EndedAt.is_(None),
        table.c.SeenAt >= now - DISPATCHER_SILENT,
        table.c.SeenAt < now + DISPATCHER_SILENT,
    )
    written = select(text).where(table.c.Reaches.is_not(None), *at_work).limit(MOST_RUNS)
    reaches = connection.execute(written).scalars()
    return {name for text in reaches for name, (_, stays) in _reaches_in(text).items() if stays}


def _reaches_in(text: str) -> dict[str, tuple[timedelta, bool]]:
    """Return the lookahead by connection, and whether the dispatcher stays; nothing if anybody else has written it."""
    try:
        return {name: (timedelta(seconds=ahead), stays is True) for name, (ahead, stays) in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def names_column(connection: Connection, tables: Tables) -> ColumnElement[str]:
    """Return the column of connections' names, for :func:`connection_names`."""
    return dialect_of(connection).beginning(tables.dispatchers.c.ConnIds, _MOST_CHARACTERS)


def connection_names(text: str) -> tuple[str | None, ...]:
    """Return the names in a JSON list; none if the text is no such list, or was cut off."""
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    return tuple(name for name in listed if name is None or isinstance(name, str)) if isinstance(listed, list) else ()
