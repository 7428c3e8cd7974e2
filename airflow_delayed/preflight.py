"""The result of the first pass over all rows, and whether they may be sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import SHOWN, InputError, MessageConflict, PastDue, some
from airflow_delayed.intake.columns import RowBatch
from airflow_delayed.intake.duplicates import Duplicates
from airflow_delayed.intake.rows import Problem
from airflow_delayed.message import MICROSECOND, DelayedMessage, microseconds
from airflow_delayed.route import Route

if TYPE_CHECKING:
    from airflow_delayed.intake.columnar import ColumnarRows, DueCounts


#: Up to so many messages a send names their ids.
NAMED = 100


@dataclass(slots=True)
class PreflightReport:
    """Counts and problems of the first pass."""

    rows: int = 0
    #: Rows that are messages; copies and those past due are among them.
    good: int = 0
    problems: list[Problem] = field(default_factory=list)
    problem_count: int = 0
    past_due: int = 0
    first_past: str | None = None
    direct: SendReport = field(default_factory=SendReport)
    stored: SendReport = field(default_factory=SendReport)
    #: The longest delay that the transport itself has to bridge.
    longest: timedelta = timedelta(0)
    #: How many delays are beyond the transport's horizon, and their sum.
    far: int = 0
    far_delays: timedelta = timedelta(0)
    #: The first few messages, for a dry run.
    sample: list[DelayedMessage] = field(default_factory=list)
    #: The ids of the first messages, copies too: up to one more than :data:`NAMED`.
    first_ids: list[str] = field(default_factory=list)
    duplicates: Duplicates = field(default_factory=Duplicates)
    #: Ids that the store has already, with other content; the first few.
    conflicts: list[str] = field(default_factory=list)
    #: The number of each batch's first row, and the batch's place.
    places: list[tuple[int, str, int]] = field(default_factory=list)

    def place(self, number: int) -> str:
        """Name a row, counted over the whole source from 0."""
        start, origin, first = next(entry for entry in reversed(self.places) if entry[0] <= number)
        return f"{origin} row {first + number - start:,}"

    @property
    def destinations(self) -> list[str]:
        """Every destination, sorted."""
        return sorted({*self.direct.by_destination, *self.stored.by_destination})

    @property
    def message_ids(self) -> list[str] | None:
        """The ids of all messages, in their order; None of over 100 messages."""
        return None if len(self.first_ids) > NAMED else list(dict.fromkeys(self.first_ids))

    def note_place(self, number: int, batch: RowBatch) -> None:
        """Note where the rows of a batch come from."""
        if batch.size:
            self.places.append((number, batch.origin, batch.first_row))

    def note(self, message: DelayedMessage, route: Route, horizon: timedelta, now: datetime) -> None:
        """Count a message that is within all limits and is sent or stored.

        :param horizon: how far the transport itself delays cheaply.
        """
        if route.holds(message, now):
            self.stored.add(message)
        else:
            self.direct.add(message)
            delay = message.due_at - now
            self.longest = max(self.longest, delay)
            if delay > horizon:
                self.far += 1
                self.far_delays += delay
        if len(self.sample) < SHOWN:
            self.sample.append(message)
        if len(self.first_ids) <= NAMED:
            self.first_ids.append(message.message_id)

    def note_all(self, checked: ColumnarRows, route: Route, horizon: timedelta, now: datetime) -> None:
        """Count messages that are within all limits and not past due.

        :param horizon: see :meth:`note`.
        """
        self.good += checked.size
        direct, stored = checked.due_counts().split(route.stored_from(now))
        for counts, report in ((direct, self.direct), (stored, self.stored)):
            if counts.size:
                report.merge(_report_of(counts))
        if direct.size:
            self.longest = max(self.longest, direct.last_due - now)
            far = direct.split(microseconds(now) + horizon // MICROSECOND)[1]
            self.far += far.size
            self.far_delays += timedelta(microseconds=far.total_us() - far.size * microseconds(now))
        if len(self.sample) < SHOWN:
            self.sample += checked.first(SHOWN - len(self.sample)).messages()
        if len(self.first_ids) <= NAMED:
            self.first_ids += checked.first(NAMED + 1 - len(self.first_ids)).message_ids()

    def judge(self, *, invalid_rows_fail: bool, stale_rows_fail: bool, max_past: timedelta, began: datetime) -> None:
        """Raise an error if something is wrong, so that nothing is sent.

        :raises InputError: rows that break a rule, that clash with each other or with the store, or that are stale.
        """
        if self.problem_count and invalid_rows_fail:
            raise InputError(
                f"{self.problem_count:,} of {self.rows:,} rows cannot be sent, so nothing was sent:"
                f" {some([str(problem) for problem in self.problems])}"
                f"{_more(self.problem_count - len(self.problems))}."
                " Mend them, or pass invalid_rows='set_aside' and rejects="
            )
        if self.duplicates.conflicts:
            pairs = [f"{self.place(one)} and {self.place(other)}" for one, other in self.duplicates.conflicts]
            raise MessageConflict(
                "rows have one message id and different content, so one would pass for a copy of the other:"
                f" {some(pairs)}. Nothing was sent. Let id_columns= (or message_id) tell them apart"
            )
        if self.conflicts:
            raise MessageConflict(
                "the store has messages with other content under the same ids:"
                f" {some(self.conflicts, separator=', ')}. Nothing was sent. For messages that"
                " still wait, pass on_conflict='replace' to put the new ones in their place, or 'keep' to leave the old"
                " ones. Dispatched and cancelled messages cannot be replaced: give a new message a new id"
            )
        if self.past_due and stale_rows_fail:
            raise PastDue(
                f"{self.past_due:,} of {self.rows:,} rows were due more than {max_past} before this task's first try"
                f" began, at {began:%Y-%m-%d %H:%M:%S} UTC; the first is {self.first_past}. Nothing was sent. If this"
                " is a backfill, pass past_due='skip'; to deliver them now, past_due='send'"
            )


def _report_of(counts: DueCounts) -> SendReport:
    return SendReport(
        sent=counts.size,
        first_due=counts.first_due,
        last_due=counts.last_due,
        by_destination=counts.by_destination(),
    )


def _more(count: int) -> str:
    return f"; and {count:,} more" if count > 0 else ""
