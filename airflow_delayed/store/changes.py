"""What can be done to messages that wait: what is decided for each, and the SQL that does it.

The decisions are pure. :class:`airflow_delayed.store.operations.Operations` finds the messages, locks them, and has
what was decided done in the same transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Literal, Protocol

from sqlalchemy import Connection, Table, insert, literal, null, select

from airflow_delayed.store import claims, leases, notice
from airflow_delayed.store.by_id import update_rows
from airflow_delayed.store.outcomes import Outcome
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.states import MessageState

#: What the table ``_past`` says of an id, and what that means for who wants to change it.
GONE: Mapping[str, Outcome] = {
    leases.HANDED_OVER: Outcome.HANDED_OVER,
    Outcome.CANCELLED.value: Outcome.ALREADY_CANCELLED,
    Outcome.PURGED.value: Outcome.ALREADY_REMOVED,
    Outcome.ERASED.value: Outcome.ALREADY_REMOVED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where an id is. ``where`` is None: nowhere; ``past``: only remembered."""

    message_id: str
    where: Literal["messages", "failed", "past"] | None = None
    #: A dispatcher or another change has it just now.
    held: bool = False
    #: A dispatcher that held it has died.
    abandoned: bool = False
    #: What is remembered of it.
    remembered: str | None = None
    #: What was looked at of the message, by column; of a failed one also Reason and FailedAt.
    row: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gone(self) -> Outcome:
        """What to say of an id whose message is not there."""
        return Outcome.ABSENT if self.remembered is None else GONE.get(self.remembered, Outcome.HANDED_OVER)


Decided = Sequence[tuple[Found, Outcome]]


class Change(Protocol):
    """Something that is done to messages."""

    #: What the audit calls it.
    action: ClassVar[str]

    def decide(self, found: Found, now: datetime) -> Outcome:
        """Return what is to become of a message that nobody holds; it may be gone."""
        ...

    def apply(self, connection: Connection, tables: Tables, decided: Decided, now: datetime) -> None:
        """Do it, to messages whose rows this transaction has locked."""
        ...


@dataclass(frozen=True, slots=True)
class Cancel:
    """Remove messages, failed ones too, and remember their ids as cancelled."""

    action: ClassVar[str] = "cancel"

    def decide(self, found: Found, now: datetime) -> Outcome:
        """Whatever is there is cancelled."""
        return Outcome.CANCELLED if found.row else found.gone

    def apply(self, connection: Connection, tables: Tables, decided: Decided, now: datetime) -> None:
        """Remove and remember."""
        gone = _changed(decided)
        _remove(connection, tables, gone)
        leases.note(connection, tables, [found.row for found in gone], Outcome.CANCELLED.value, now)


@dataclass(frozen=True, slots=True)
class Erase:
    """Remove messages and all that is known of them but the id and when, which keeps a late retry from sending it."""

    action: ClassVar[str] = "erase"

    def decide(self, found: Found, now: datetime) -> Outcome:
        """What was handed over came too late, and yet what is remembered of it goes."""
        if found.row or found.remembered in (Outcome.CANCELLED.value, Outcome.PURGED.value):
            return Outcome.ERASED
        return found.gone

    def apply(self, connection: Connection, tables: Tables, decided: Decided, now: datetime) -> None:
        """Remove, and leave an empty memory."""
        _remove(connection, tables, [found for found in _changed(decided) if found.row])
        blank = [
            {"Id": found.message_id, "Destination": None, "Time": None, "Digest": None}
            for found, outcome in decided
            if outcome in (Outcome.ERASED, Outcome.HANDED_OVER)
        ]
        leases.note(connection, tables, blank, Outcome.ERASED.value, now)


@dataclass(frozen=True, slots=True)
class Reschedule:
    """Give messages that wait another due time. Their digest stays: a retry of the send that stored them is no news."""

    due_at: datetime
    action: ClassVar[str] = "reschedule"

    def decide(self, found: Found, now: datetime) -> Outcome:
        """Only what waits, and lives until it is due."""
        if not found.row:
            return found.gone
        if found.where == "failed":
            return Outcome.EXPIRED if found.row["Reason"] == MessageState.EXPIRED.value else Outcome.FAILED
        if found.row["ExpiresAt"] is not None and found.row["ExpiresAt"] <= max(now, self.due_at):
            return Outcome.EXPIRED if found.row["ExpiresAt"] <= now else Outcome.EXPIRES_FIRST
        return Outcome.UNCHANGED if found.row["Time"] == self.due_at else Outcome.RESCHEDULED

    def apply(self, connection: Connection, tables: Tables, decided: Decided, now: datetime) -> None:
        """Change the due time; a pause after a failure ends."""
        moved, table = _changed(decided), tables.messages
        for some in claims.slices([found.message_id for found in moved]):
            connection.execute(update_rows(table, some).values(Time=self.due_at, NextTry=None))
        # a dispatcher that was only slow must not settle what it knows under another due time
        leases.forget(connection, tables, [found.message_id for found in moved if found.abandoned])
        _wake(connection, tables, moved, self.due_at)


@dataclass(frozen=True, slots=True)
class Retry:
    """Let failed messages wait again, as if they had never failed; they are handed over at once if they are due."""

    action: ClassVar[str] = "retry"

    def decide(self, found: Found, now: datetime) -> Outcome:
        """Only what has failed, and has not expired."""
        if not found.row:
            return found.gone
        if found.where == "messages":
            return Outcome.UNCHANGED
        expires = found.row["ExpiresAt"]
        return Outcome.EXPIRED if expires is not None and expires <= now else Outcome.RETRIED

    def apply(self, connection: Connection, tables: Tables, decided: Decided, now: datetime) -> None:
        """Move the rows within the database, bodies unread."""
        again = _changed(decided)
        anew = {"RetryCount": literal(0), "NextTry": null()}
        names = [column.name for column in tables.messages.columns]
        for some in claims.slices([found.message_id for found in again]):
            values = [anew.get(name, tables.failed.c[name]) for name in names]
            rows = select(*values).where(tables.failed.c.Id.in_(some))
            connection.execute(insert(tables.messages).from_select(names, rows))
        _remove(connection, tables, again)
        if again:
            _wake(connection, tables, again, min(found.row["Time"] for found in again))


@dataclass(frozen=True, slots=True)
class Purge:
    """Remove failed and expired messages that have been so since before a time, and remember their ids as purged."""

    before: datetime
    reasons: Sequence[str]
    action: ClassVar[str] = "purge"

    def decide(self, found: Found, now: datetime) -> Outcome:
        """Only what has failed or expired long ago."""
        if not found.row:
            return found.gone
        old = found.where == "failed" and found.row["Reason"] in self.reasons and found.row["FailedAt"] < self.before
        return Outcome.PURGED if old else Outcome.UNCHANGED

    def apply(self, connection: Connection, tables: Tables, decided: Decided, now: datetime) -> None:
        """Remove and remember."""
        gone = _changed(decided)
        _remove(connection, tables, gone)
        leases.note(connection, tables, [found.row for found in gone], Outcome.PURGED.value, now)


def _changed(decided: Decided) -> list[Found]:
    return [found for found, outcome in decided if outcome.changed]


def _wake(connection: Connection, tables: Tables, moved: Sequence[Found], earliest: datetime) -> None:
    """Tell dispatchers that sleep for longer than until then."""
    if moved:
        notice.give(connection, tables.messages, earliest, [found.row["DeliverConnId"] for found in moved])


def _remove(connection: Connection, tables: Tables, gone: Sequence[Found]) -> None:
    for where in ("messages", "failed"):
        table: Table = getattr(tables, where)
        claims.remove(connection, table, [found.message_id for found in gone if found.where == where])
