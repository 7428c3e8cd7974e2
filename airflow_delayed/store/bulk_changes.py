"""Changing many messages, beside dispatchers at work. No Airflow here.

Each thousand ids have a short transaction of their own: lock the messages, and skip rows that another transaction has
locked; read the leases; decide; apply; write the audit. A dispatcher locks a message before it writes its lease, so a
message is either changed or delivered, never both.

On PostgreSQL a cancel by filter first removes up to 2500 messages in one statement, see
:meth:`airflow_delayed.store.changes.Cancel.take`; what that leaves is changed in the same way as all else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import (
    TIMESTAMP,
    ColumnElement,
    Connection,
    Engine,
    Table,
    Text,
    cast,
    func,
    select,
    type_coerce,
)

from airflow_delayed.errors import WrongToken
from airflow_delayed.store import audit, remembered_ids
from airflow_delayed.store.audit import AuditEntry
from airflow_delayed.store.bulk import own_place
from airflow_delayed.store.changes import Location, MessageChange, Purge, locate
from airflow_delayed.store.database import IDS, slices
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.engine import retried
from airflow_delayed.store.filters import FilterArgs, MessageFilter, MessageState
from airflow_delayed.store.outcomes import MAX_TOMBSTONES, NAMED_IDS, Outcome, Outcomes, OutOfReach
from airflow_delayed.store.queries import (
    PAGE,
    DatabaseTime,
    Place,
    behind_place,
    first_rows,
    not_due,
    only_run,
    page_values,
)
from airflow_delayed.store.records import count_rows, place_of, token_of
from airflow_delayed.store.schema import Tables, Where

log = logging.getLogger(__name__)

#: Seconds between two lines in the log of a change of many messages.
LOGGED_EVERY = 10.0
#: How long to wait in all for messages in flight, and between two attempts; in seconds.
IN_FLIGHT_WAIT = 0.5
_PAUSE = 0.05
#: Messages that one statement cancels: with more, dispatchers would miss them for longer, and gain little.
TAKEN = 2500
#: Messages behind a limit are counted up to this number.
MAX_COUNTED = 1_000_000
#: The reason to purge ids of the table ``_past``.
REMEMBERED = "remembered"

T = TypeVar("T")
#: Ids of messages; on PostgreSQL, where they were found by a filter, with the place of each.
Ids = Sequence[str] | Mapping[str, str]


class ChangeArgs(FilterArgs, total=False):
    """The keywords of a change: the filter, unless it is by ids, and these."""

    #: A change by filter considers at most so many; ``next`` of the outcomes is where to continue.
    limit: int | None
    #: Continue a change by filter there.
    after: str | None
    #: Add to this row of the audit, the ``audit_seq`` of the change's first outcomes, in place of a row of its own.
    audit_seq: int | None
    #: Change nothing, and return what would happen.
    dry_run: bool
    #: The user for the audit; by default the task, or the user of the operating system.
    actor: str | None
    #: The user's reason, for the audit.
    because: str | None


class BulkChanges:
    """Changes the messages of one store."""

    def __init__(
        self,
        engine: Engine,
        tables: Tables,
        *,
        database_time: DatabaseTime = database_time,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._tables = tables
        self._database_time = database_time
        self._sleep = sleep
        self._monotonic = monotonic

    def by_ids(
        self, change: MessageChange, ids: Iterable[str], *, who: str, because: str | None = None, dry_run: bool = False
    ) -> Outcomes:
        """Change messages by their ids, and return the outcomes in the order of the ids."""
        asked = list(dict.fromkeys(ids))
        found = Outcomes()
        if asked:
            entry = AuditEntry(who, change.action, {**audit.of_ids(asked), **change.details}, because=because)
            _finish(self._run(change, slices(asked), MessageFilter(), entry, found, dry_run=dry_run))
        in_order = Outcomes()
        in_order.add({message_id: found[message_id] for message_id in asked})
        in_order.out_of_reach = found.out_of_reach
        return in_order

    def by_filter(
        self,
        change: MessageChange,
        wanted: MessageFilter,
        *,
        who: str,
        because: str | None = None,
        dry_run: bool = False,
        limit: int | None = None,
        after: str | None = None,
        audit_seq: int | None = None,
    ) -> Outcomes:
        """Change the messages that match a filter. A message that is stored meanwhile may be missed."""
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit} is not positive")
        found = Outcomes(NAMED_IDS)
        selection = change.selection(wanted)
        entry = AuditEntry(who, change.action, selection, because=because, hide_tag=change.hides_tag)
        if audit_seq is not None:
            self._reading(lambda connection: entry.go_on(connection, self._tables, audit_seq))
        pages = self._pages(change, wanted, limit=limit, after=after)
        if change.hides_tag:
            # before, for afterwards no tombstone has the tag
            found.out_of_reach = self.out_of_reach(change, wanted)
        _finish(self._run(change, pages, wanted, entry, found, dry_run=dry_run, continued=after is not None))
        if not change.hides_tag:
            # later, so that it has what was dispatched meanwhile
            found.out_of_reach = self.out_of_reach(change, wanted, own=found.changed)
        found.next, found.audit_seq = pages.next, entry.seq
        if found.next is not None:
            found.more = pages.remaining(MAX_COUNTED if dry_run else 1)
        return found

    def out_of_reach(self, change: MessageChange, wanted: MessageFilter, own: int = 0) -> OutOfReach:
        """Return what matches a filter, was dispatched and is not due yet; ``own`` tombstones are the change's own."""
        left_too = wanted.states is None or set(wanted.states) - {MessageState.FAILED, MessageState.EXPIRED}
        if not change.takes_back or not left_too or wanted.cancelled or wanted.reason is not None:
            return OutOfReach()
        with dialect_of(self._engine).read_only(self._engine) as connection:
            return not_due(connection, self._tables, wanted, self._database_time(connection), MAX_TOMBSTONES + own)

    def purge(
        self,
        older_than: timedelta,
        reasons: Sequence[str],
        *,
        who: str,
        because: str | None = None,
        dry_run: bool = False,
    ) -> Outcomes:
        """Purge, see the store; ``reasons`` are "failed", "expired", "remembered"."""
        before = self._reading(self._database_time) - older_than
        found = Outcomes(NAMED_IDS)
        selection = {"older_than": older_than.total_seconds(), "reasons": list(reasons)}
        entry = AuditEntry(who, Purge.action, selection, because=because)
        if REMEMBERED in reasons:
            self._forget(before, entry, found, dry_run=dry_run)
        states = tuple(MessageState(reason) for reason in reasons if reason != REMEMBERED)
        if states:
            change, wanted = Purge(before, states), MessageFilter(states=states)
            _finish(self._run(change, self._pages(change, wanted), wanted, entry, found, dry_run=dry_run))
        return found

    def _pages(
        self, change: MessageChange, wanted: MessageFilter, *, limit: int | None = None, after: str | None = None
    ) -> IdPages:
        return IdPages(
            self._engine,
            self._tables,
            change,
            wanted,
            limit=limit,
            after=after,
            database_time=self._database_time,
            places=change.takes and wanted.states is None and dialect_of(self._engine).claims_at_once,
        )

    def _forget(self, before: datetime, entry: AuditEntry, found: Outcomes, *, dry_run: bool) -> None:
        if dry_run:
            past = self._tables.past
            many = self._reading(
                lambda one: count_rows(
                    one, past, *remembered_ids.old_ids(self._tables, before, self._database_time(one))
                )
            )
            found.count(Outcome.FORGOTTEN, many) if many else None
            return

        def work(connection: Connection) -> tuple[int, int]:
            now = self._database_time(connection)
            gone = remembered_ids.forget_old_ids(connection, self._tables, before, now)
            counts = {**found.counts, Outcome.FORGOTTEN: found.counts.get(Outcome.FORGOTTEN, 0) + gone}
            return gone, entry.write(connection, self._tables, counts, now)

        while True:
            gone, seq = self._changing(work)
            entry.written(seq)
            if gone:
                found.count(Outcome.FORGOTTEN, gone)
            if gone < IDS:
                return

    def _run(
        self,
        change: MessageChange,
        chunks: Iterable[Ids],
        wanted: MessageFilter,
        entry: AuditEntry,
        found: Outcomes,
        *,
        dry_run: bool,
        continued: bool = False,
    ) -> Iterator[None]:
        """Change all chunks, yielding after each; then wait up to half a second for the messages in flight."""
        pending: list[str] = []
        met, logged_at = continued, self._monotonic()
        for chunk in chunks:
            met = True
            rest = list(chunk) if dry_run else self._take(change, chunk, wanted, entry, found)
            if rest:
                pending += self._chunk(change, rest, wanted, entry, found, dry_run=dry_run)
            if self._monotonic() - logged_at >= LOGGED_EVERY:
                logged_at = self._monotonic()
                log.info("%s: %s", "would be so far" if dry_run else "so far", found.in_words)
            yield
        if not met and not dry_run:
            # a change that matches no message is in the audit too
            self._chunk(change, [], wanted, entry, found, dry_run=dry_run)
        end = self._monotonic() + IN_FLIGHT_WAIT
        while pending and not dry_run and self._monotonic() < end:
            self._sleep(_PAUSE)
            still: list[str] = []
            for some in slices(pending):
                still += self._chunk(change, some, wanted, entry, found, again=True)
            pending = still

    def _chunk(
        self,
        change: MessageChange,
        ids: Sequence[str],
        wanted: MessageFilter,
        entry: AuditEntry,
        found: Outcomes,
        *,
        again: bool = False,
        dry_run: bool = False,
    ) -> list[str]:
        """Change some messages in one transaction, and return the ids of those in flight."""
        before = ids if again else ()

        def work(connection: Connection) -> tuple[list[tuple[Location, Outcome]], dict[str, Outcome], int]:
            now = self._database_time(connection)
            located = locate(
                connection,
                self._tables,
                ids,
                now,
                wanted,
                lock=not dry_run,
                cancelled_too="cancelled" in change.where,
                past_too=change.writes_past,
            )
            decided = [(one, Outcome.IN_FLIGHT if one.leased else change.decide(one, now)) for one in located]
            outcomes = {one.message_id: outcome for one, outcome in decided}
            if dry_run:
                return decided, outcomes, 0
            change.apply(connection, self._tables, decided, now)
            counts = found.counts_with(outcomes, instead_of=before)
            return decided, outcomes, entry.write(connection, self._tables, counts, now)

        decided, outcomes, seq = self._reading(work) if dry_run else self._changing(work)
        if not dry_run:
            entry.written(seq)
        found.add(outcomes, instead_of=before)
        for one, outcome in decided:
            if change.takes_back and one.not_due is not None and outcome is Outcome.DISPATCHED:
                found.out_of_reach.add(*one.not_due)
        return [message_id for message_id, outcome in outcomes.items() if outcome is Outcome.IN_FLIGHT]

    def _take(
        self, change: MessageChange, ids: Ids, wanted: MessageFilter, entry: AuditEntry, found: Outcomes
    ) -> Sequence[str]:
        if not isinstance(ids, Mapping):
            return list(ids)

        def work(connection: Connection) -> tuple[list[str], dict[str, Outcome], int]:
            now = self._database_time(connection)
            left = change.take(connection, self._tables, ids, wanted, now)
            taken = dict.fromkeys(sorted(ids), Outcome.CANCELLED)
            for message_id in left:
                del taken[message_id]
            return left, taken, entry.write(connection, self._tables, found.counts_with(taken), now)

        left, taken, seq = self._changing(work)
        entry.written(seq)
        found.add(taken)
        return left

    def _changing(self, work: Callable[[Connection], T]) -> T:
        return retried(self._engine, work, sleep=self._sleep, monotonic=self._monotonic)

    def _reading(self, work: Callable[[Connection], T]) -> T:
        with self._engine.connect().execution_options(read_only=True) as connection:
            return work(connection)


def _finish(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


class IdPages:
    """Yields the ids of all messages that a change by filter selects, a page at a time, one table after the other.

    It can be iterated once, and reads each page when the caller asks for it.

    :param places: yield waiting messages with their places where the database has them.
    """

    def __init__(
        self,
        engine: Engine,
        tables: Tables,
        change: MessageChange,
        wanted: MessageFilter,
        *,
        limit: int | None,
        after: str | None,
        database_time: DatabaseTime,
        places: bool,
    ) -> None:
        self._engine = engine
        self._tables = tables
        self._wanted = wanted
        self._more = change.conditions
        self._places = places
        self._limit = limit
        self._database_time = database_time
        self._todo = _todo(change.where, after)
        #: The token of the place where the limit ended the iteration; None: there are no more messages.
        self.next: str | None = None

    def __iter__(self) -> Iterator[Ids]:
        left = self._limit
        while self._todo:
            where, place = self._todo[0]
            page = TAKEN if self._places and where == "messages" else PAGE
            size = page if left is None else min(page, left)
            found = self._page(where, place, size)
            if len(found) < size:
                del self._todo[0]
            else:
                self._todo[0] = (where, (found[-1][0], found[-1][1]))
            if found:
                placed = len(found[0]) > 2
                yield {row[1]: row[2] for row in found} if placed else [row[1] for row in found]
            if left is not None:
                left -= len(found)
                if not left:
                    self.next = _token(*self._todo[0]) if self._todo else None
                    return

    def _page(self, where: Where, place: Place | None, size: int) -> Sequence[tuple[Any, ...]]:
        table = self._tables.of(where)
        with dialect_of(self._engine).read_only(self._engine) as connection:
            run, _ = only_run(connection, self._tables, self._wanted)
            # several runs are read from a join, in which no row has a place
            placed = self._places and where == "messages" and (run is not None or self._wanted.sent_by is None)
            statement = first_rows(
                dialect_of(connection),
                self._tables,
                where,
                self._wanted,
                _columns(table, placed=placed),
                one_run=run is not None,
                behind=place is not None,
                size=size,
                more=self._more(table),
            )
            if statement is None:
                return []
            values = page_values(self._database_time(connection), place, run)
            return connection.execute(statement, values).all()

    def remaining(self, most: int) -> int:
        """Count the messages behind the limit, up to so many."""
        counted = 0
        for where, place in self._todo:
            table = self._tables.of(where)
            conditions = self._wanted.conditions(self._tables, where)
            if conditions is not None:
                with self._engine.connect().execution_options(read_only=True) as connection:
                    conditions += self._more(table)
                    if place is not None:
                        conditions += behind_place(table, dialect_of(connection))
                    some = select(table.c.Id).where(*conditions).limit(most - counted).subquery()
                    values = page_values(self._database_time(connection), place)
                    count = select(func.count()).select_from(some)
                    counted += int(connection.execute(count, values).scalar_one())
            if counted >= most:
                break
        return counted


def _columns(table: Table, *, placed: bool) -> list[ColumnElement[Any]]:
    if not placed:
        return [table.c.Time, table.c.Id]
    # the time as the driver returns it, in UTC: to convert each takes as long as the rest of a row
    return [type_coerce(table.c.Time, TIMESTAMP(timezone=True)), table.c.Id, cast(own_place(), Text)]


def _token(where: Where, place: Place | None) -> str:
    return where if place is None else f"{where}.{token_of(*place)}"


def _todo(where: Sequence[Where], after: str | None) -> list[tuple[Where, Place | None]]:
    if after is None:
        return [(one, None) for one in where]
    name, _, place = after.partition(".")
    if name not in where:
        raise WrongToken("after= is no token of a change by filter; give the next of the last answer")
    begin = where[list(where).index(name) :]  # type: ignore[arg-type]
    return [(one, place_of(place) if one == name and place else None) for one in begin]
