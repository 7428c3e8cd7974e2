"""Taking over what waits in another store's table, such as NServiceBus's, while that store may be at work.

A run locks a batch of rows in the foreign table, oldest due first, skipping rows that other transactions have locked.
It copies them into our store with the same ids, and deletes from the foreign table the rows that our store now has. A
run that is killed in between leaves the rows in the foreign table, unlocked, and perhaps copies in our store: the next
run finds the copies by their ids and only deletes. So nothing is lost, and nothing is in our store twice. After a kill,
a dispatcher of the other store can send again the rows that were copied and not yet deleted, one batch at most.

The lock lasts for one bulk insert; no broker is asked meanwhile. SQLite has no row locks: there a row is deleted only
if it is still equal to its copy. No Airflow here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, Row, Select, Table, bindparam, delete, func, select, update

from airflow_delayed.delivery import DelayStore, SendReport
from airflow_delayed.errors import InputError, some
from airflow_delayed.identity import digest_of
from airflow_delayed.message import DelayedMessage
from airflow_delayed.reports import counts_text, due_span, in_brackets, largest_first
from airflow_delayed.store.database import slices
from airflow_delayed.store.dialects import dialect_of
from airflow_delayed.store.nservicebus.foreign_table import NSERVICEBUS_COLUMNS, Reader, retries_of

log = logging.getLogger(__name__)

#: A run stops after so many rows that cannot be taken over: each later query must exclude them by id.
MAX_LEFT = 1000
#: Batches between two log lines about progress.
_PROGRESS = 20

_Row = Mapping[str, Any]


@dataclass(slots=True)
class AdoptReport:
    """Counts of a run; with ``dry_run`` what a run would do.

    ``adopted``: rows that this run has moved into our store. ``duplicates``: rows whose id our store had already,
    waiting, delivered or cancelled; they are deleted from the foreign table too. ``failures``: the reason by id for
    each row that cannot be taken over; these rows stay in the foreign table. So do ``remaining`` others: another
    dispatcher has locked them, or they came meanwhile, or the run stopped after 1000 failures.
    """

    adopted: int = 0
    duplicates: int = 0
    remaining: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    by_destination: dict[str, int] = field(default_factory=dict)
    first_due: datetime | None = None
    last_due: datetime | None = None

    def __str__(self) -> str:
        """Return the counts as a line, without counts of 0 except ``adopted``, and the first failures."""
        destinations = in_brackets(largest_first(self.by_destination))
        line = f"{self.adopted:,} adopted{destinations}{due_span(self.first_due, self.last_due)}"
        line += counts_text({"duplicates": self.duplicates, "remaining": self.remaining})
        if not self.failures:
            return line
        cases = some([f"{name}: {reason}" for name, reason in self.failures.items()])
        return f"{line}; {len(self.failures):,} rows stay where they are: {cases}"

    def summary(self) -> dict[str, Any]:
        """Return the counts as plain values, for an XCom."""
        return {
            "adopted": self.adopted,
            "duplicates": self.duplicates,
            "failed": len(self.failures),
            "remaining": self.remaining,
            "by_destination": dict(self.by_destination),
            "first_due": self.first_due.isoformat() if self.first_due else None,
            "last_due": self.last_due.isoformat() if self.last_due else None,
        }


class Adopter:
    """Takes over a foreign table.

    :param engine: of the database in which both tables are.
    :param source: the foreign table, from :func:`~airflow_delayed.store.nservicebus.foreign_table.foreign_table`.
    :param messages: our store's table of messages, for the counts of failures.
    :param store: our store.
    :param batch_size: rows that are locked and copied at a time.
    :raises ValueError: the batch size is not 1 to 1000.
    """

    def __init__(
        self, engine: Engine, source: Table, messages: Table, store: DelayStore, reader: Reader, batch_size: int = 500
    ) -> None:
        if not 1 <= batch_size <= MAX_LEFT:
            raise ValueError(f"batch_size={batch_size} must be 1 to {MAX_LEFT}")
        self._dialect = dialect_of(engine)
        self._engine = engine
        self._source = source
        self._messages = messages
        self._store = store
        self._reader = reader
        self._batch_size = batch_size

    def run(self) -> AdoptReport:
        """Take over all rows that can be.

        :raises TransportUnavailable: the database cannot be reached; earlier batches stay taken over.
        """
        report, left = AdoptReport(), list[Any]()
        batches = 0
        while len(left) < MAX_LEFT and self._batch(report, left):
            batches += 1
            if batches % _PROGRESS == 0:
                log.info("table %s: %s messages adopted so far", self._source.fullname, f"{report.adopted:,}")
        with self._engine.connect().execution_options(read_only=True) as connection:
            there = connection.execute(select(func.count()).select_from(self._source)).scalar_one()
        report.remaining = max(0, there - len(left))
        self._log(report)
        return report

    def plan(self) -> AdoptReport:
        """Return what a run would take over, as far as reading shows. Nothing is locked or changed."""
        report = AdoptReport()
        statement = _oldest_first(self._source)
        with self._engine.connect().execution_options(read_only=True, yield_per=self._batch_size) as connection:
            for part in connection.execute(statement).partitions():
                counts = SendReport()
                for message in self._readable(map(_by_key, part), report):
                    counts.add(message)
                _count(report, counts)
                if len(report.failures) >= MAX_LEFT:
                    break
        self._log(report)
        return report

    def _log(self, report: AdoptReport) -> None:
        log.log(logging.WARNING if report.failures else logging.INFO, "table %s: %s", self._source.fullname, report)

    def _batch(self, report: AdoptReport, left: list[Any]) -> int:
        """Take over one batch, and return how many rows it had."""
        if self._dialect.locks_rows:
            with self._engine.begin() as connection:
                rows = self._fetch(connection, self._due(left))
                self._settle(connection, self._copy(rows, report, left))
        else:
            with self._engine.connect().execution_options(read_only=True) as connection:
                rows = self._fetch(connection, self._due(left))
            copied = self._copy(rows, report, left)
            with self._engine.begin() as connection:
                ids = [row["Id"] for row in copied]
                there = [
                    row
                    for some_ids in slices(ids)
                    for row in self._fetch(connection, select(self._source).where(self._source.c.Id.in_(some_ids)))
                ]
                self._settle(connection, [row for row in copied if row in there])
        return len(rows)

    def _due(self, left: Sequence[Any]) -> Select[Any]:
        return due(self._source, left, self._batch_size)

    def _fetch(self, connection: Connection, statement: Select[Any]) -> list[dict[str, Any]]:
        return list(map(_by_key, connection.execute(statement)))

    def _readable(self, rows: Iterable[_Row], report: AdoptReport) -> list[DelayedMessage]:
        """Return the messages that our store can take, and record the others in the report."""
        messages = []
        for row in rows:
            try:
                message = self._reader.message(row)
                self._store.check(message, message.due_at)
            except InputError as error:
                report.failures[str(row["Id"])] = str(error)
            else:
                messages.append(message)
        clashing = set(self._store.conflicting({message.message_id: digest_of(message) for message in messages}))
        report.failures.update(dict.fromkeys(clashing, "our store has this id with other content"))
        return [message for message in messages if message.message_id not in clashing]

    def _copy(self, rows: Sequence[dict[str, Any]], report: AdoptReport, left: list[Any]) -> list[dict[str, Any]]:
        """Store a batch, and return the rows that our store has now."""
        messages = self._readable(rows, report)
        if messages:
            _count(report, self._store.send(messages))
        copied = {message.message_id for message in messages}
        left += [row["Id"] for row in rows if str(row["Id"]) not in copied]
        return [row for row in rows if str(row["Id"]) in copied]

    def _settle(self, connection: Connection, rows: Sequence[_Row]) -> None:
        """Carry over how often rows have failed, and delete them."""
        ours = self._messages
        if counts := [{"name": str(row["Id"]), "count": retries_of(row)} for row in rows if retries_of(row) > 0]:
            count = bindparam("count", type_=ours.c.RetryCount.type)
            one = (ours.c.Id == bindparam("name")) & (ours.c.RetryCount < count)
            connection.execute(update(ours).where(one).values(RetryCount=count), counts)
        for ids in slices([row["Id"] for row in rows]):
            connection.execute(delete(self._source).where(self._source.c.Id.in_(ids)))


def _oldest_first(source: Table) -> Select[Any]:
    return select(source).order_by(source.c.Time)


def due(source: Table, left: Sequence[Any], limit: int) -> Select[Any]:
    """Return the query that locks the next rows, except those in ``left``; it skips locked rows."""
    statement = _oldest_first(source).limit(limit).with_for_update(skip_locked=True)
    return statement.where(source.c.Id.not_in(left)) if left else statement


def _by_key(row: Row[Any]) -> dict[str, Any]:
    """Return a row of a foreign table by NServiceBus's names."""
    return dict(zip(NSERVICEBUS_COLUMNS, row, strict=True))


def _count(report: AdoptReport, sent: SendReport) -> None:
    report.adopted += sent.sent
    report.duplicates += sent.duplicates
    for destination, count in sent.by_destination.items():
        report.by_destination[destination] = report.by_destination.get(destination, 0) + count
    dues = [due for due in (report.first_due, report.last_due, sent.first_due, sent.last_due) if due]
    if dues:
        report.first_due, report.last_due = min(dues), max(dues)
