"""Changing one's mind about messages, beside dispatchers at work. No Airflow here.

Ids are worked on a thousand at a time, each thousand in a short transaction of its own: lock the messages, passing
over those that another transaction has; then look who holds a lease; decide; do it; write the audit. So a message is
changed or handed over, never both: a dispatcher locks the message before it writes its lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Table, and_, or_, select

from airflow_delayed.store import audit, claims
from airflow_delayed.store.audit import AuditEntry
from airflow_delayed.store.by_id import delete_rows
from airflow_delayed.store.changes import Change, Purge, Reschedule, Retry
from airflow_delayed.store.contention import retried
from airflow_delayed.store.criteria import Criteria
from airflow_delayed.store.id_pages import IdPages
from airflow_delayed.store.listing import DatabaseTime
from airflow_delayed.store.look import look
from airflow_delayed.store.ordered import Conditions, Where
from airflow_delayed.store.outcomes import NAMED, Outcome, Outcomes
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.states import MessageState

#: How long to wait in all for messages in flight, and between two looks; in seconds.
PATIENCE = 0.5
PAUSE = 0.05

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

    def by_criteria(
        self,
        change: Change,
        criteria: Criteria,
        *,
        who: str,
        dry_run: bool = False,
        limit: int | None = None,
        after: str | None = None,
    ) -> Outcomes:
        """Change the messages that a filter means. What is stored meanwhile may be missed.

        :param limit: look at no more than so many; ``next`` of the outcomes says where to go on, and of a dry run
            ``more`` how many there are besides.
        :param after: go on there.
        :raises ValueError: ``after`` is no token, or ``limit`` is not positive.
        """
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit} is not positive")
        found = Outcomes(NAMED)
        entry = AuditEntry(who, change.action, {**criteria.given, **_told(change)})
        where: Sequence[Where] = ["failed"] if isinstance(change, Retry) else ["messages", "failed"]
        more: Callable[[Table], Conditions] = _any
        if isinstance(change, Reschedule):
            where, more = ["messages"], partial(_due_otherwise, change.due_at)
        pages = self._pages(criteria, where, more, limit=limit, after=after)
        self._run(change, pages, criteria, entry, found, dry_run=dry_run, on=after is not None)
        found.next = pages.next
        if dry_run and found.next is not None:
            found.more = pages.left()
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
            pages = self._pages(criteria, ["failed"], partial(_failed_before, before))
            self._run(Purge(before, states), pages, criteria, entry, found, dry_run=dry_run)
        return found

    def _pages(
        self,
        criteria: Criteria,
        where: Sequence[Where],
        more: Callable[[Table], Conditions],
        *,
        limit: int | None = None,
        after: str | None = None,
    ) -> IdPages:
        return IdPages(
            self._engine,
            self._tables,
            criteria,
            where=where,
            more=more,
            limit=limit,
            after=after,
            database_time=self._database_time,
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
        on: bool = False,
    ) -> None:
        """Work through all chunks, then wait a little for those in flight.

        :param on: there were some before.
        """
        pending: list[str] = []
        met = on
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


def _any(table: Table) -> Conditions:
    return []


def _due_otherwise(due_at: datetime, table: Table) -> Conditions:
    # what has been moved is not met again further on
    return [table.c.Time != due_at]


def _failed_before(before: datetime, table: Table) -> Conditions:
    return [table.c.FailedAt < before]


def _told(change: Change) -> dict[str, Any]:
    return {"to": change.due_at.isoformat()} if isinstance(change, Reschedule) else {}
