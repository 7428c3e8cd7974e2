"""Changing one's mind about messages, beside dispatchers at work. No Airflow here.

Ids are worked on a thousand at a time, each thousand in a short transaction of its own: lock the messages, passing
over those that another transaction has; then look who holds a lease; decide; do it; write the audit. So a message is
changed or handed over, never both: a dispatcher locks the message before it writes its lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar

from sqlalchemy import Connection, Engine, Select, Table, and_, case, literal, or_, select, union_all

from airflow_delayed.store import audit, claims
from airflow_delayed.store.audit import AuditEntry
from airflow_delayed.store.by_id import by_key, delete_rows
from airflow_delayed.store.changes import Change, Found, Purge, Reschedule, Retry
from airflow_delayed.store.contention import retried
from airflow_delayed.store.criteria import Criteria
from airflow_delayed.store.listing import Conditions, DatabaseTime, Where, pages_of_ids
from airflow_delayed.store.outcomes import NAMED, Outcome, Outcomes
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.states import MessageState, state_of

#: How long to wait in all for messages in flight, and between two looks; in seconds.
PATIENCE = 0.5
PAUSE = 0.05

_LOOKED_AT = ("Id", "Destination", "Time", "Digest", "DeliverConnId", "ExpiresAt", "NextTry")
T = TypeVar("T")


class Operations:
    """The changes to one store.

    :param database_time: reads the database's clock, which alone decides.
    """

    def __init__(
        self,
        engine: Engine,
        tables: Tables,
        *,
        database_time: DatabaseTime = claims.database_time,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._tables = tables
        self._database_time = database_time
        self._sleep = sleep
        self._monotonic = monotonic

    def now(self) -> datetime:
        """Return the database's time."""
        with self._engine.connect().execution_options(read_only=True) as connection:
            return self._database_time(connection)

    def by_ids(self, change: Change, ids: Iterable[str], *, who: str, dry_run: bool = False) -> Outcomes:
        """Change messages by their ids, and return what became of each, in the order given."""
        asked = list(dict.fromkeys(ids))
        found = Outcomes()
        if asked:
            entry = AuditEntry(who, change.action, {**audit.of_ids(asked), **_told(change)})
            self._run(change, claims.slices(asked), Criteria(), entry, found, dry_run=dry_run)
        inorder = Outcomes()
        inorder.add({message_id: found[message_id] for message_id in asked})
        return inorder

    def by_criteria(self, change: Change, criteria: Criteria, *, who: str, dry_run: bool = False) -> Outcomes:
        """Change all messages that a filter means. What is stored meanwhile may be missed."""
        found = Outcomes(NAMED)
        entry = AuditEntry(who, change.action, {**criteria.given, **_told(change)})
        if isinstance(change, Reschedule):
            # what has been moved is not met again further on
            due = change.due_at
            pages = self._pages(criteria, ["messages"], lambda table: [table.c.Time != due])
        else:
            pages = self._pages(criteria, ["failed"] if isinstance(change, Retry) else ["messages", "failed"])
        self._run(change, pages, criteria, entry, found, dry_run=dry_run)
        return found

    def purge(self, older_than: timedelta, reasons: Sequence[str], *, who: str, dry_run: bool = False) -> Outcomes:
        """Remove what failed or expired, and forget what is remembered, for longer than a span.

        :param reasons: "failed", "expired", "remembered".
        """
        before = self.now() - older_than
        found = Outcomes(NAMED)
        told = {"older_than": older_than.total_seconds(), "reasons": list(reasons)}
        entry = AuditEntry(who, Purge.action, told)
        if REMEMBERED in reasons:
            self._forget(before, entry, found, dry_run=dry_run)
        states = tuple(MessageState(reason) for reason in reasons if reason != REMEMBERED)
        if states:
            criteria = Criteria(states=states)
            pages = self._pages(criteria, ["failed"], lambda table: [table.c.FailedAt < before])
            self._run(Purge(before, states), pages, criteria, entry, found, dry_run=dry_run)
        return found

    def _pages(
        self, criteria: Criteria, where: Sequence[Where], more: Callable[[Table], Conditions] = lambda table: []
    ) -> Iterator[list[str]]:
        return pages_of_ids(
            self._engine, self._tables, criteria, where=where, more=more, database_time=self._database_time
        )

    def _forget(self, before: datetime, entry: AuditEntry, found: Outcomes, *, dry_run: bool) -> None:
        past = self._tables.past

        def old(now: datetime) -> Any:
            return and_(past.c.At < before, or_(past.c.ClaimedUntil.is_(None), past.c.ClaimedUntil <= now))

        if dry_run:
            with self._engine.connect().execution_options(read_only=True) as connection:
                many = claims.count(connection, past, old(self._database_time(connection)))
            found.count(Outcome.FORGOTTEN, many) if many else None
            return

        def work(connection: Connection) -> tuple[int, int, int]:
            now = self._database_time(connection)
            some = select(past.c.Id).where(old(now)).order_by(past.c.At).limit(claims.IDS)
            ids = list(connection.execute(some).scalars())
            gone = connection.execute(delete_rows(past, sorted(ids)).where(old(now))).rowcount if ids else 0
            counts = {**found.counts, Outcome.FORGOTTEN: found.counts.get(Outcome.FORGOTTEN, 0) + gone}
            return len(ids), gone, entry.write(connection, self._tables, counts, now)

        while True:
            seen, gone, seq = self._changing(work)
            entry.written(seq)
            if gone:
                found.count(Outcome.FORGOTTEN, gone)
            if seen < claims.IDS:
                return

    def _run(
        self,
        change: Change,
        chunks: Iterable[list[str]],
        criteria: Criteria,
        entry: AuditEntry,
        found: Outcomes,
        *,
        dry_run: bool,
    ) -> None:
        """Work through all chunks, then wait a little for those in flight."""
        pending: list[str] = []
        met = False
        for chunk in chunks:
            met = True
            pending += self._chunk(change, chunk, criteria, entry, found, dry_run=dry_run)
        if not met and not dry_run:
            self._chunk(change, [], criteria, entry, found, dry_run=dry_run)  # that nothing was found is told too
        end = self._monotonic() + PATIENCE
        while pending and not dry_run and self._monotonic() < end:
            self._sleep(PAUSE)
            still: list[str] = []
            for some in claims.slices(pending):
                still += self._chunk(change, some, criteria, entry, found, again=True)
            pending = still

    def _chunk(
        self,
        change: Change,
        ids: Sequence[str],
        criteria: Criteria,
        entry: AuditEntry,
        found: Outcomes,
        *,
        again: bool = False,
        dry_run: bool = False,
    ) -> list[str]:
        """Change some messages in one transaction, and return those in flight."""
        before = ids if again else ()

        def work(connection: Connection) -> tuple[dict[str, Outcome], int]:
            now = self._database_time(connection)
            looked = look(connection, self._tables, ids, now, criteria, lock=not dry_run)
            decided = [(one, Outcome.IN_FLIGHT if one.held else change.decide(one, now)) for one in looked]
            outcomes = {one.message_id: outcome for one, outcome in decided}
            if dry_run:
                return outcomes, 0
            change.apply(connection, self._tables, decided, now)
            return outcomes, entry.write(connection, self._tables, found.counts_with(outcomes, instead_of=before), now)

        outcomes, seq = self._looking(work) if dry_run else self._changing(work)
        if not dry_run:
            entry.written(seq)
        found.add(outcomes, instead_of=before)
        return [message_id for message_id, outcome in outcomes.items() if outcome is Outcome.IN_FLIGHT]

    def _changing(self, work: Callable[[Connection], T]) -> T:
        return retried(self._engine, work, sleep=self._sleep, monotonic=self._monotonic)

    def _looking(self, work: Callable[[Connection], T]) -> T:
        with self._engine.connect().execution_options(read_only=True) as connection:
            return work(connection)


#: What is purged of the table ``_past``.
REMEMBERED = "remembered"


def _told(change: Change) -> dict[str, Any]:
    return {"to": change.due_at.isoformat()} if isinstance(change, Reschedule) else {}


def look(
    connection: Connection, tables: Tables, ids: Sequence[str], now: datetime, criteria: Criteria, *, lock: bool
) -> list[Found]:
    """Return where each id is, its row locked if nobody else has it, without those that a filter does not mean.

    The order of the statements matters: each sees what was committed before it. First the messages, then the failed
    ones; then those that are there and were passed over; then who holds a lease and what is remembered.
    """
    found: dict[str, Found] = {}
    left_out: set[str] = set()
    asked = sorted(ids)
    for table in (tables.messages, tables.failed):
        rest = [message_id for message_id in asked if message_id not in found and message_id not in left_out]
        for row in _found(connection, table, rest, criteria, lock=lock):
            if not row.pop("Meant"):
                left_out.add(row["Id"])
            else:
                where: Literal["messages", "failed"] = "failed" if table is tables.failed else "messages"
                found[row["Id"]] = Found(message_id=row["Id"], where=where, row=row)
    rest = [message_id for message_id in asked if message_id not in found and message_id not in left_out]
    for message_id in _there(connection, tables, rest):
        found[message_id] = Found(message_id=message_id, held=True)
    past = tables.past
    for some in claims.slices([message_id for message_id in asked if message_id not in left_out]):
        said = select(past.c.Id, past.c.Outcome, past.c.ClaimedUntil).where(past.c.Id.in_(some))
        for row_ in connection.execute(said):
            one = found.get(row_.Id)
            if one is None:
                found[row_.Id] = Found(message_id=row_.Id, where="past", remembered=row_.Outcome)
            elif one.where == "messages" and row_.ClaimedUntil is not None:
                held = row_.ClaimedUntil > now
                found[row_.Id] = replace(one, held=held, abandoned=not held)
    for message_id in asked:
        if message_id not in left_out:
            found.setdefault(message_id, Found(message_id=message_id))
    return [one for one in found.values() if _stands(one, criteria, now)]


def _found(
    connection: Connection, table: Table, ids: Sequence[str], criteria: Criteria, *, lock: bool
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for some in claims.slices(ids):
        statement = locking(table, some, criteria) if lock else _looking_at(table, some, criteria)
        rows += [dict(row._mapping) for row in connection.execute(statement)]
    return rows


def _looking_at(table: Table, ids: Sequence[str], criteria: Criteria) -> Select[Any]:
    """Return the query for these rows, of which Meant says whether a filter means them."""
    names = [*_LOOKED_AT, *(("Reason", "FailedAt") if "Reason" in table.c else ())]
    fixed = criteria.fixed(table)
    meant = literal(1) if fixed is None else case((fixed, 1), else_=0)
    columns = [table.c[name] for name in names]
    return select(*columns, meant.label("Meant")).where(table.c.Id.in_(ids)).order_by(table.c.Id)


def locking(table: Table, ids: Sequence[str], criteria: Criteria) -> Select[Any]:
    """Return the query that locks these rows, passing over those that another transaction has."""
    statement = _looking_at(table, ids, criteria).with_for_update(skip_locked=True)
    return by_key(statement.with_hint(table, "WITH (READPAST, UPDLOCK, ROWLOCK)", "mssql"), table)


def _there(connection: Connection, tables: Tables, ids: Sequence[str]) -> set[str]:
    """Return the ids that are there after all: locked by others, or on their way from one table to the other."""
    found: set[str] = set()
    for some in claims.slices(ids):
        both = (select(table.c.Id).where(table.c.Id.in_(some)) for table in (tables.messages, tables.failed))
        found.update(connection.execute(union_all(*both)).scalars())
    return found


def _stands(found: Found, criteria: Criteria, now: datetime) -> bool:
    """Whether it still stands as the filter wants; who holds it decides otherwise."""
    if criteria.states is None or found.held or not found.row:
        return True
    if found.where == "failed":
        return MessageState(found.row["Reason"]) in criteria.states
    return state_of({**found.row, "ClaimedUntil": None}, now) in criteria.states
