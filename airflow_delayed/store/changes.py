"""Cancel, restore, erase, reschedule, retry and purge: what is decided for each message, and the SQL that applies it.

A decision is a pure function. :class:`airflow_delayed.store.bulk_changes.BulkChanges` finds and locks the messages by
:func:`locate`, and applies the decisions in the same transaction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, ClassVar, Literal

from sqlalchemy import (
    Connection,
    Row,
    Select,
    Table,
    Text,
    and_,
    any_,
    bindparam,
    case,
    cast,
    delete,
    func,
    literal,
    null,
    select,
    union_all,
)
from sqlalchemy.dialects.postgresql import ARRAY

from airflow_delayed.errors import WrongState
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store import bulk, cancelled, remembered_ids
from airflow_delayed.store.audit import AuditEntry, of_ids
from airflow_delayed.store.database import slices
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.engine import Overtaken
from airflow_delayed.store.filters import (
    BOTH,
    CANCELLED,
    Conditions,
    FilterArgs,
    MessageFilter,
    MessageState,
    failed_state,
    filter_of,
    state_of,
    stays_until_due,
    take_left,
)
from airflow_delayed.store.outcomes import Outcome
from airflow_delayed.store.records import insert_new_rows, remove_rows, to_row
from airflow_delayed.store.schema import Tables, Where

#: The columns that a change reads.
_READ = ("Id", "Destination", "Time", "Digest", "DeliverConnId", "ExpiresAt", "NextTry", "RetryCount", "Tag", "Run")


#: The outcome of a change for a remembered id, by its column Outcome in the table ``_past``.
GONE: Mapping[str, Outcome] = {
    **dict.fromkeys(remembered_ids.SENT, Outcome.DISPATCHED),
    Outcome.CANCELLED.value: Outcome.ALREADY_CANCELLED,
    Outcome.PURGED.value: Outcome.ALREADY_REMOVED,
    Outcome.ERASED.value: Outcome.ALREADY_REMOVED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where the message of an id is; ``where`` is "past" for a remembered id, and None for an unknown one."""

    message_id: str
    where: Where | Literal["past"] | None = None
    #: A dispatcher has a lease of it, or another change has locked it.
    leased: bool = False
    #: A dispatcher had a lease of it, which has ended.
    abandoned: bool = False
    #: The outcome in the table ``_past``.
    remembered: str | None = None
    #: The connection and the due time of a message that was dispatched to a broker and is not due yet.
    not_due: tuple[str, datetime] | None = None
    #: The columns of the message, if it is there and unlocked; of a failed message also Reason and FailedAt, of a
    #: cancelled one Reason and Until.
    row: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gone(self) -> Outcome:
        """The outcome for an id whose message is not there."""
        return Outcome.ABSENT if self.remembered is None else GONE.get(self.remembered, Outcome.DISPATCHED)


Decided = Sequence[tuple[Location, Outcome]]


class MessageChange(ABC):
    """A change of messages."""

    __slots__ = ()

    #: Its name in the audit.
    action: ClassVar[str]
    #: The tables whose messages a filter selects.
    where: ClassVar[Sequence[Where]]
    #: The only state that a filter may have, and what becomes of its messages.
    only: ClassVar[tuple[str, str] | None] = None
    #: The audit may not name the tag of a selection.
    hides_tag: ClassVar[bool] = False
    #: It writes remembered ids whose message nothing else locks any more.
    writes_past: ClassVar[bool] = False
    #: Its :meth:`take` can change waiting messages in one statement of PostgreSQL.
    takes: ClassVar[bool] = False
    #: Its answer has what was dispatched and is not due yet.
    takes_back: ClassVar[bool] = False

    @property
    def details(self) -> Mapping[str, Any]:
        """What the audit has of it beside the selection."""
        return {}

    def conditions(self, table: Table) -> Conditions:
        """Return further conditions for the messages of a table that a filter selects."""
        return []

    @abstractmethod
    def decide(self, found: Location, now: datetime) -> Outcome:
        """Return the outcome for a message without a lease, or for an id without a message."""

    @abstractmethod
    def apply(self, connection: Connection, tables: Tables, decided: Decided, now: datetime) -> None:
        """Change messages whose rows this transaction has locked."""

    def take(
        self, connection: Connection, tables: Tables, places: Mapping[str, str], wanted: MessageFilter, now: datetime
    ) -> list[str]:
        """Change waiting messages in one statement, and return the ids of the messages that it left."""
        return [*places]

    @classmethod
    def check(
        cls,
        ids: Sequence[str] | None,
        filters: FilterArgs,
        *,
        own_conn_id: str,
        limit: int | None = None,
        after: str | None = None,
        audit_seq: int | None = None,
    ) -> MessageFilter:
        """Return the filter of a change, which has no criterion if the change is by ids."""
        state = filters.get("state")
        if cls.only is not None and state not in (None, (only := cls.only[0]), [only], (only,)):
            raise WrongState(f"{cls.action}: state={state!r}: only {only} messages are {cls.only[1]}")
        left = take_left(filters)
        if left and (left != (CANCELLED,) or CANCELLED not in cls.where):
            raise WrongState(
                f"{cls.action}: state={left[0]!r}: these messages have left the store; cancelled ones can be restored"
                " or erased, and of all others only the ids are there"
            )
        wanted = replace(filter_of(filters, own_conn_id=own_conn_id), cancelled=bool(left))
        if ids is not None and wanted.criteria:
            raise ValueError(f"{cls.action}: give ids or a filter, and not both")
        if ids is None and not wanted.criteria:
            raise ValueError(f"{cls.action}: give ids, tag= or another filter; a filter needs a criterion")
        if ids is not None and (limit, after, audit_seq) != (None, None, None):
            raise ValueError(f"{cls.action}: limit=, after= and audit_seq= are for a filter")
        return wanted

    def selection(self, wanted: MessageFilter) -> dict[str, Any]:
        """Return the selection of a change by filter, for the audit."""
        return {**wanted.criteria, **self.details}


@dataclass(frozen=True, slots=True)
class Cancel(MessageChange):
    """Remove messages, failed ones too, and remember their ids as cancelled."""

    grace: timedelta = timedelta(0)
    action: ClassVar[str] = "cancel"
    where: ClassVar[Sequence[Where]] = BOTH
    takes: ClassVar[bool] = True
    takes_back: ClassVar[bool] = True

    def decide(self, found: Location, now: datetime) -> Outcome:
        """Return CANCELLED for each message in the store."""
        return Outcome.CANCELLED if found.row else found.gone

    def apply(self, connection: Connection, tables: Tables, decided: Decided, now: datetime) -> None:
        """Move the rows within the database, without reading bodies, and remember their ids."""
        gone = _changed(decided)
        if gone:
            cancelled.forget(connection, tables, now)
        _remove_and_record(connection, tables, gone, Outcome.CANCELLED, now, self._until(now))

    def take(
        self, connection: Connection, tables: Tables, places: Mapping[str, str], wanted: MessageFilter, now: datetime
    ) -> list[str]:
        """Cancel waiting messages in one statement of PostgreSQL, and return the ids of the messages that it left.

        It leaves messages that have moved or changed since, that another transaction has locked, or that have leases.
        """
        dialect = dialect_of(connection)
        # else the table could be read from end to end, and each message compared with each other one
        dialect.go_by_indexes(connection)
        dialect.join_by_hash(connection)
        until = self._until(now)
        values = {"now": now, "until": until, "ids": bulk.array(places), "places": bulk.array(places.values())}
        statement = _cancelling(tables, wanted, keeps=until is not None)
        left: list[str] = list(connection.execute(statement, values).scalars())
        if len(left) < len(places):
            cancelled.forget(connection, tables, now)
        return left

    def _until(self, now: datetime) -> datetime | None:
        return now + self.grace if self.grace > timedelta(0) else None


@dataclass(frozen=True, slots=True)
class Restore(MessageChange):
    """Take cancels back: the messages wait again, or are failed ones again, as they were."""

    overdue_ok: bool = False
    action: ClassVar[str] = "restore"
    where: ClassVar[Sequence[Where]] = ("cancelled",)
    only: ClassVar[tuple[str, str] | None] = CANCELLED, "restored"

    def conditions(self, table: Table) -> Conditions:
        """Return the condition for messages that are kept; its time is a parameter of a page."""
        return [table.c.Until > bindparam("now", type_=table.c.Until.type)]

    def decide(self, found: Location, now: datetime) -> Outcome:
        """Return RESTORED for a cancelled message that is kept, and neither expired nor overdue."""
        row = found.row
        if found.where in BOTH:
            return Outcome.ALREADY_STORED
        if not row or row["Until"] <= now or found.gone not in (Outcome.ALREADY_CANCELLED, Outcome.ABSENT):
            return found.gone
        if row["Reason"] is None and row["ExpiresAt"] is not None and row["ExpiresAt"] <= now:
            return Outcome.EXPIRED
        overdue = row["Reason"] is None and row["Time"] <= now and not self.overdue_ok
        return Outcome.OVERDUE if overdue else Outcome.RESTORED

    def apply(self, connection: Connection, tables: Tables, decided: Decided, now: datetime) -> None:
        """Move the rows back, and delete the records of their ids."""
        back = _changed(decided)
        ids = sorted(found.message_id for found in back)
        failed = sorted(found.message_id for found in back if found.row["Reason"] is not None)
        # a failed message too: so a send of the same id, which looks for failed ones before the remembered, waits for
        # the end of this transaction
        for table, some in ((tables.messages, ids), (tables.failed, failed)):
            values = {column.name: tables.cancelled.c[column.name] for column in table.c}
            cancelled.copy(connection, tables.cancelled, table, some, values)
        remove_rows(connection, tables.messages, failed)
        remove_rows(connection, tables.cancelled, ids)
        remembered_ids.forget(connection, tables, ids)
        if any(found.where == "cancelled" for found, _ in decided):
            cancelled.forget(connection, tables, now)


@dataclass(frozen=True, slots=True)
class Erase(MessageChange):
    """Remove messages and all records of them but id and time, which keep a late retry from sending them again."""

    action: ClassVar[str] = "erase"
    where: ClassVar[Sequence[Where]] = (*BOTH, "cancelled")
    hides_tag: ClassVar[bool] = True
    writes_past: ClassVar[bool] = True
    takes_back: ClassVar[bool] = True

    def decide(self, found: Location, now: datetime) -> Outcome:
        """Return ERASED, or DISPATCHED for a delivered message, of which :meth:`apply` blanks the record."""
        if found.row or found.remembered in (Outcome.CANCELLED.value, Outcome.PURGED.value):
            return Outcome.ERASED
        return found.gone

    def apply(self, connection: Connection, tables: Tables, decided: Decided, now: datetime) -> None:
        """Remove the messages, and blank the records of their ids."""
        _remove(connection, tables, [found for found in _changed(decided) if found.row])
        at_rest = [found.message_id for found, outcome in decided if outcome is not Outcome.IN_FLIGHT]
        cancelled.forget_ids(connection, tables, at_rest)
        nothing = dict.fromkeys(name for name in remembered_ids.RECORDED if name != "Id")
        blank = [
            {"Id": found.message_id, **nothing}
            for found, outcome in decided
            if outcome in (Outcome.ERASED, Outcome.DISPATCHED)
        ]
        _record(connection, tables, blank, Outcome.ERASED, now)


@dataclass(frozen=True, slots=True)
class Reschedule(MessageChange):
    """Change the due time of waiting messages. Their digest stays, by which a retry of their send recognises them."""

    due_at: datetime
    action: ClassVar[str] = "reschedule"
    where: ClassVar[Sequence[Where]] = ("messages",)
    takes_back: ClassVar[bool] = True

    @property
    def details(self) -> Mapping[str, Any]:
        """The new due time."""
        return {"to": self.due_at.isoformat()}

    def conditions(self, table: Table) -> Conditions:
        """Return the condition by which a message that was rescheduled is not found again on a later page."""
        return [table.c.Time != self.due_at]

    def decide(self, found: Location, now: datetime) -> Outcome:
        """Return RESCHEDULED for a waiting message that does not expire before its new due time."""
        if not found.row:
            return found.gone
        if found.where == "failed":
            return Outcome.EXPIRED if found.row["Reason"] == MessageState.EXPIRED.value else Outcome.FAILED
        if found.row["ExpiresAt"] is not None and found.row["ExpiresAt"] <= max(now, self.due_at):
            return Outcome.EXPIRED if found.row["ExpiresAt"] <= now else Outcome.EXPIRES_FIRST
        return Outcome.UNCHANGED if found.row["Time"] == self.due_at else Outcome.RESCHEDULED

    def apply(self, connection: Connection, tables: Tables, decided: Decided, now: datetime) -> None:
        """Change the due time, and end the pause after a failure."""
        moved, table, dialect = _changed(decided), tables.messages, dialect_of(connection)
        # a message that stays until it is due goes on doing so
        for until_due, next_try in ((False, None), (True, self.due_at)):
            ids = [found.message_id for found in moved if stays_until_due(found.row) is until_due]
            for some in slices(ids):
                connection.execute(dialect.update_rows(table, some).values(Time=self.due_at, NextTry=next_try))
        # a slow dispatcher whose lease has ended must not settle the message by its old due time
        remembered_ids.forget(connection, tables, [found.message_id for found in moved if found.abandoned])


@dataclass(frozen=True, slots=True)
class Retry(MessageChange):
    """Let failed messages wait again, as if they had never failed; they are dispatched at once if they are due."""

    action: ClassVar[str] = "retry"
    where: ClassVar[Sequence[Where]] = ("failed",)
    only: ClassVar[tuple[str, str] | None] = MessageState.FAILED.value, "retried"

    def decide(self, found: Location, now: datetime) -> Outcome:
        """Return RETRIED for a failed message that has not expired."""
        if not found.row:
            return found.gone
        if found.where == "messages":
            return Outcome.UNCHANGED
        expires = found.row["ExpiresAt"]
        return Outcome.EXPIRED if expires is not None and expires <= now else Outcome.RETRIED

    def apply(self, connection: Connection, tables: Tables, decided: Decided, now: datetime) -> None:
        """Move the rows within the database, without reading bodies."""
        again = _changed(decided)
        reset = {"RetryCount": literal(0), "NextTry": null(), "LastError": null()}
        values = {column.name: reset.get(column.name, tables.failed.c[column.name]) for column in tables.messages.c}
        cancelled.copy(connection, tables.failed, tables.messages, [found.message_id for found in again], values)
        _remove(connection, tables, again)


@dataclass(frozen=True, slots=True)
class Purge(MessageChange):
    """Remove messages that failed or expired before a time, and remember their ids as purged."""

    before: datetime
    reasons: Sequence[str]
    action: ClassVar[str] = "purge"
    where: ClassVar[Sequence[Where]] = ("failed",)

    def conditions(self, table: Table) -> Conditions:
        """Return the condition for messages that failed or expired before the time."""
        return [table.c.FailedAt < self.before]

    def decide(self, found: Location, now: datetime) -> Outcome:
        """Return PURGED for a message that failed or expired, for one of the reasons, before the time."""
        if not found.row:
            return found.gone
        old = found.where == "failed" and found.row["Reason"] in self.reasons and found.row["FailedAt"] < self.before
        return Outcome.PURGED if old else Outcome.UNCHANGED

    def apply(self, connection: Connection, tables: Tables, decided: Decided, now: datetime) -> None:
        """Remove the messages, and remember their ids."""
        _remove_and_record(connection, tables, _changed(decided), Outcome.PURGED, now)


def _changed(decided: Decided) -> list[Location]:
    return [found for found, outcome in decided if outcome.changed]


def _record(
    connection: Connection, tables: Tables, rows: Sequence[Mapping[str, Any]], outcome: Outcome, now: datetime
) -> None:
    remembered_ids.record(connection, tables, rows, outcome.value, now)


def _remove_and_record(
    connection: Connection,
    tables: Tables,
    gone: Sequence[Location],
    outcome: Outcome,
    now: datetime,
    until: datetime | None = None,
) -> None:
    """Remove messages and remember their ids; ``until``: keep them until then, so that they can be restored."""
    dialect = dialect_of(connection)
    for where in BOTH:
        source = tables.of(where)
        ids = [found.message_id for found in gone if found.where == where]
        if not dialect.claims_at_once:
            if until is not None:
                cancelled.keep(connection, tables, source, ids, until)
            remove_rows(connection, source, ids)
            continue
        for some in slices(ids):
            # in one statement each row is looked up once, and not three times
            removed = dialect.delete_rows(source.c.Id, some).returning(*source.c).cte("removed")
            statement = remembered_ids.record_removed(tables, removed, outcome.value)
            if until is not None:
                statement = statement.add_cte(cancelled.keep_all(tables, removed))
            connection.execute(statement, {"now": now, "until": until})
    if not dialect.claims_at_once:
        _record(connection, tables, [found.row for found in gone], outcome, now)


@lru_cache(maxsize=32)
def _cancelling(tables: Tables, wanted: MessageFilter, *, keeps: bool) -> Select[Any]:
    table = tables.messages
    at_places = select(*table.c, bulk.own_place().label("place")).where(bulk.own_place() == any_(bulk.given_places()))
    locked = at_places.with_for_update(skip_locked=True).cte("locked")
    # a place may have got another message since; and a message that was changed since has got another place
    ids = cast(bindparam("ids", type_=Text()), ARRAY(Text()))
    given = func.unnest(ids, bulk.given_places()).table_valued("id", "place", name="given").render_derived()
    same = and_(given.c.id == locked.c.Id, given.c.place == locked.c.place)
    matching = select(locked).join(given, same)
    free = matching.where(*wanted.stable_conditions(tables, locked)).cte("free")
    # the upsert sees a lease that was committed since the statement began
    recorded = remembered_ids.record_unleased(tables, free, Outcome.CANCELLED.value).cte("recorded")
    gone = select(free).join(recorded, recorded.c.Id == free.c.Id).cte("gone")
    at_these = func.array(select(gone.c.place).scalar_subquery())
    removed = delete(table).where(bulk.own_place() == any_(at_these)).cte("removed")
    statement = select(given.c.id).where(given.c.id.not_in(select(gone.c.Id))).add_cte(removed)
    return statement.add_cte(cancelled.keep_all(tables, gone)) if keeps else statement


def _remove(connection: Connection, tables: Tables, gone: Sequence[Location]) -> None:
    for where in BOTH:
        table = tables.of(where)
        remove_rows(connection, table, [found.message_id for found in gone if found.where == where])


def cancel_or_remember(
    connection: Connection, *, tables: Tables, ids: Sequence[str], change: Cancel, who: str
) -> dict[str, Outcome]:
    """Cancel messages; remember the ids that the store does not know, as those of erased messages.

    Each unknown id has a row meanwhile, so that a send of it waits for the end of this transaction.

    :raises Overtaken: another transaction has changed one of them at this moment; roll back, and repeat.
    """
    now = database_time(connection)
    rows = [to_row(DelayedMessage(destination="-", body=b"", due_at=now, message_id=one), None) for one in sorted(ids)]
    inserted = insert_new_rows(connection, tables.messages, [{**row, "StoredAt": now} for row in rows])
    remove_rows(connection, tables.messages, sorted(inserted))
    located = locate(connection, tables, ids, now, MessageFilter(), lock=True)
    decided = [(one, Outcome.IN_FLIGHT if one.leased else change.decide(one, now)) for one in located]
    unknown = [one.message_id for one, outcome in decided if outcome is Outcome.ABSENT]
    if gone := [one for one in unknown if one not in inserted]:
        raise Overtaken(", ".join(gone))
    change.apply(connection, tables, decided, now)
    blank = dict.fromkeys(remembered_ids.RECORDED)
    _record(connection, tables, [{**blank, "Id": one} for one in unknown], Outcome.ERASED, now)
    if _changed(decided):
        counts = Counter(outcome for _, outcome in decided)
        AuditEntry(who, change.action, of_ids(sorted(ids))).write(connection, tables, counts, now)
    return {one.message_id: outcome for one, outcome in decided}


def locate(
    connection: Connection,
    tables: Tables,
    ids: Sequence[str],
    now: datetime,
    wanted: MessageFilter,
    *,
    lock: bool,
    cancelled_too: bool = False,
    past_too: bool = False,
) -> list[Location]:
    """Return where each id is, without ids that do not match the filter.

    The order of the statements matters, because each sees what was committed before it: the messages; the failed
    messages; the cancelled ones; ids that are in one of these tables after all; leases and remembered ids; and, for ids
    that are in neither of the first two tables, these tables once more.

    :param lock: lock the rows; a row that another transaction has locked counts as leased.
    """
    places: Sequence[Where] = (*BOTH, "cancelled") if cancelled_too else BOTH
    found: dict[str, Location] = {}
    unwanted: set[str] = set()
    asked = sorted(ids)
    for where in places:
        rest = [message_id for message_id in asked if message_id not in found and message_id not in unwanted]
        for row in _rows(connection, tables, where, rest, wanted, lock=lock):
            if row.pop("Matches"):
                found[row["Id"]] = Location(message_id=row["Id"], where=where, row=row)
            else:
                unwanted.add(row["Id"])
    asked = [message_id for message_id in asked if message_id not in unwanted]
    missing = [message_id for message_id in asked if message_id not in found]
    for message_id in _present(connection, tables, missing, places):
        found[message_id] = Location(message_id=message_id, leased=True)
    notes, busy = _notes(connection, tables, asked, lock=lock and past_too)
    for note in notes:
        one = found.get(note.Id)
        if one is None:
            ahead = note.Outcome == remembered_ids.DISPATCHED and note.Time is not None and note.Time > now
            not_due = (note.DeliverConnId, note.Time) if ahead and note.DeliverConnId is not None else None
            found[note.Id] = Location(message_id=note.Id, where="past", remembered=note.Outcome, not_due=not_due)
        elif one.where == "cancelled":
            found[note.Id] = replace(one, remembered=note.Outcome)
        elif one.where == "messages" and note.ClaimedUntil is not None:
            leased = note.ClaimedUntil > now
            found[note.Id] = replace(one, leased=leased, abandoned=not leased)
    for message_id in busy:
        found[message_id] = replace(found.get(message_id, Location(message_id=message_id)), leased=True)
    # a message that was stored and claimed since the first query has a lease, which looks like a delivered one; one
    # that was restored since then is remembered no longer
    there = {one.message_id for one in found.values() if one.leased or one.where in BOTH}
    gone = [message_id for message_id in asked if message_id not in there]
    for message_id in _present(connection, tables, gone, BOTH):
        found[message_id] = Location(message_id=message_id, leased=True)
    for message_id in asked:
        found.setdefault(message_id, Location(message_id=message_id))
    return [one for one in found.values() if _in_wanted_state(one, wanted, now)]


def _rows(
    connection: Connection, tables: Tables, where: Where, ids: Sequence[str], wanted: MessageFilter, *, lock: bool
) -> list[dict[str, Any]]:
    table = tables.of(where)
    dialect, rows = dialect_of(connection), list[dict[str, Any]]()
    names = [*_read_of(table), "Matches"]
    for some in slices(ids):
        statement = _reading(tables, table, wanted).where(dialect.among(table.c.Id, some))
        if lock:
            statement = dialect.by_key(statement.with_for_update(skip_locked=True), table)
        rows += [dict(zip(names, row, strict=True)) for row in connection.execute(statement).all()]
    return rows


def _notes(
    connection: Connection, tables: Tables, ids: Sequence[str], *, lock: bool
) -> tuple[list[Row[Any]], set[str]]:
    """Return the records of ids in ``_past``, and the ids whose records another transaction has locked."""
    past, dialect, notes, busy = tables.past, dialect_of(connection), list[Row[Any]](), set[str]()
    for some in slices(ids):
        these = dialect.among(past.c.Id, some), past.c.Id >= remembered_ids.FIRST_ID
        noted = select(past.c.Id, past.c.Outcome, past.c.ClaimedUntil, past.c.Time, past.c.DeliverConnId).where(*these)
        if not lock:
            notes += connection.execute(noted)
            continue
        locking = dialect.by_key(noted.order_by(past.c.Id).with_for_update(skip_locked=True), past)
        locked = connection.execute(locking).all()
        notes += locked
        # who waited for these rows could wait for a transaction that waits for a message's row
        there = connection.execute(select(past.c.Id).where(*these)).scalars()
        busy.update({*there} - {note.Id for note in locked})
    return notes, busy


def _read_of(table: Table) -> Sequence[str]:
    return [*_READ, *(name for name in ("Reason", "FailedAt", "Until") if name in table.c)]


def _reading(tables: Tables, table: Table, wanted: MessageFilter) -> Select[Any]:
    """Return the query for rows; its column Matches says whether a row matches the filter."""
    conditions = wanted.stable_conditions(tables, table)
    matches = case((and_(*conditions), 1), else_=0) if conditions else literal(1)
    columns = [table.c[name] for name in _read_of(table)]
    return select(*columns, matches.label("Matches")).order_by(table.c.Id)


def _present(connection: Connection, tables: Tables, ids: Sequence[str], places: Sequence[Where]) -> set[str]:
    found, dialect = set[str](), dialect_of(connection)
    for some in slices(ids):
        each = (tables.of(where).c.Id for where in places)
        these = (select(one).where(dialect.among(one, some)) for one in each)
        found.update(connection.execute(union_all(*these)).scalars())
    return found


def _in_wanted_state(found: Location, wanted: MessageFilter, now: datetime) -> bool:
    """Return whether a message is still in a state of the filter; a leased message counts as if it were."""
    if wanted.cancelled and found.where in BOTH and not found.leased:
        return False
    if wanted.states is None or found.leased or not found.row:
        return True
    if found.where == "cancelled":
        return False
    if found.where == "failed":
        return failed_state(found.row["Reason"]) in wanted.states
    return state_of({**found.row, "ClaimedUntil": None}, now) in wanted.states
