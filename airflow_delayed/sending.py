"""From a source of rows to confirmed messages: everything is checked in a first pass, and sent in a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import datetime, timedelta
from typing import Any, Protocol

from airflow_delayed.delivery import Clock, DelayedDelivery, KeepsOpen, SendReport
from airflow_delayed.errors import SHOWN, DelayedError, InputError, Interrupted, InvalidMessage
from airflow_delayed.intake.batch import row_of
from airflow_delayed.intake.columns import Wanted
from airflow_delayed.intake.ledger import Ledger
from airflow_delayed.intake.rows import Problem, RowReader
from airflow_delayed.intake.sources import Source
from airflow_delayed.mark import Fingerprint, Mark, Marks
from airflow_delayed.message import UTC, DelayedMessage
from airflow_delayed.route import Route
from airflow_delayed.survey import Survey

#: Messages given to a transport at a time; so many, and no more, may come twice when a task is killed and tried again.
#: After each, Airflow is asked to keep how far it came, which takes it as long as a broker some hundred messages.
CHUNK = 2000
_FIRST = datetime.min.replace(tzinfo=UTC)
#: Ids asked of the store at a time.
ASKED = 1000
#: Seconds between two lines of progress in the log.
PROGRESS_SECONDS = 10.0


class Log(Protocol):
    """Takes lines of text."""

    def info(self, event: str, /, *args: Any) -> Any:
        """Tell how it goes."""
        ...

    def warning(self, event: str, /, *args: Any) -> Any:
        """Tell what deserves a look."""
        ...


class Sending:
    """One send: its source, its rules, its route.

    :param past_due: "fail", "send" or "skip" what was due more than ``max_past`` before it began.
    :param began: when the first try of this send began.
    :param clock: the present.
    :param log: takes progress; never a body or a header's value.
    :param way: stands for the connections and options that it goes by.
    """

    def __init__(
        self,
        source: Source,
        wanted: Wanted,
        reader: Callable[[], RowReader],
        route: Route,
        *,
        began: datetime,
        past_due: str = "fail",
        max_past: timedelta = timedelta(hours=1),
        clock: Clock,
        log: Log,
        way: bytes = b"",
    ) -> None:
        self.source = source
        self.wanted = wanted
        self.route = route
        self.past_due = past_due
        # what lies more than that back is before all that a calendar has
        self.oldest = began - max_past if max_past < began - _FIRST else _FIRST
        self.max_past = max_past
        self.clock = clock
        self.log = log
        self.way = way
        #: What this try has sent and stored.
        self.sent = SendReport()
        self.held = SendReport()
        self.skipped = 0
        #: Where this try began, and which messages earlier tries had confirmed.
        self.start = Mark()
        self.earlier = SendReport()
        self._reader = reader
        self._horizon = route.delivery.horizon
        self._separate = route.store is not None and not route.holds_all
        self._ask: dict[str, bytes] = {}
        self._told = 0.0
        # limits are judged by one moment, so that both passes set the same rows aside
        self._judged_at = clock()

    def first_due(self, enough: datetime) -> datetime | None:
        """Return when the first message is due, or one that is due by ``enough``, or None if there is none.

        Rows that break a rule are left out here: the survey judges them.
        """
        first: datetime | None = None
        for _, item in self._items(self._reader(), None):
            if isinstance(item, Problem) or (self.past_due == "skip" and self._is_past(item)):
                continue
            if first is None or item.due_at < first:
                first = item.due_at
                if first <= enough:
                    break
        return first

    def survey(self, *, set_aside: Callable[[Problem], None] | None = None) -> Survey:
        """Read everything once and send nothing.

        :param set_aside: takes rows that break a rule; without it they are an error.
        :raises InputError: something is wrong with the source, with rows, or with what they say together.
        """
        found = Survey(fingerprint=Fingerprint(self.way))
        reader = self._reader()
        ledger = Ledger()
        try:
            for number, item in self._items(reader, found):
                found.rows += 1
                self._look(item, number, found, ledger, set_aside)
                if found.rows % 1000 == 0:
                    self._progress("checked", found.rows)
            self._ask_store(found)
            found.repeats = ledger.repeats()
        finally:
            ledger.close()
        found.judge(
            invalid_rows_fail=set_aside is None, stale_rows_fail=self.past_due == "fail", max_past=self.max_past
        )
        shifts = reader.shifts
        if shifts.gaps or shifts.folds:
            self.log.warning(
                "daylight saving: %s local times that a gap skips were moved later; of %s that happen twice the first"
                " was taken",
                f"{shifts.gaps:,}",
                f"{shifts.folds:,}",
            )
        return found

    def _items(self, reader: RowReader, found: Survey | None) -> Iterator[tuple[int, DelayedMessage | Problem]]:
        number = 0
        for batch in self.source.batches(self.wanted):
            if found is not None:
                found.note_place(number, batch)
            for item in reader.read(batch):
                yield number, item
                number += 1

    def _look(
        self,
        item: DelayedMessage | Problem,
        number: int,
        found: Survey,
        ledger: Ledger,
        set_aside: Callable[[Problem], None] | None,
    ) -> None:
        problem = item if isinstance(item, Problem) else self._refusal(item, number, found)
        if problem is not None:
            found.problem_count += 1
            if len(found.problems) < SHOWN:
                found.problems.append(problem)
            found.fingerprint.pass_over()
            if set_aside is not None:
                set_aside(problem)
            return
        assert isinstance(item, DelayedMessage)
        found.good += 1
        if self._is_past(item):
            found.past_due += 1
            if found.first_past is None:
                found.first_past = f"{found.place(number)}, due {item.due_at:%Y-%m-%d %H:%M:%S} UTC"
            if self.past_due == "skip":
                found.fingerprint.pass_over()
                return
        now = self.clock()
        digest = found.fingerprint.add(item)
        # what is due soon may wait in the store from an earlier run
        self._ask[item.message_id] = digest
        if len(self._ask) >= ASKED:
            self._ask_store(found)
        if self.route.holds(item, now):
            found.held.add(item)
        else:
            found.direct.add(item)
            delay = item.due_at - now
            found.longest = max(found.longest, delay)
            if delay > self._horizon:
                found.far += 1
                found.far_delays += delay
        if len(found.sample) < SHOWN:
            found.sample.append(item)
        ledger.add(item.message_id, digest, number)

    def _ask_store(self, found: Survey) -> None:
        if self._ask and self.route.store is not None and len(found.conflicts) < SHOWN:
            found.conflicts += self.route.store.conflicting(self._ask)
        self._ask.clear()

    def _refusal(self, message: DelayedMessage, number: int, found: Survey) -> Problem | None:
        try:
            self.route.check(message, self._judged_at)
        except InvalidMessage as error:
            return Problem(found.place(number), error.column, error.problem, row_of(message))
        return None

    def _is_past(self, message: DelayedMessage) -> bool:
        return message.due_at < self.oldest

    def deliver(self, found: Survey, *, dry_run: bool = False, marks: Marks | None = None) -> None:
        """Send what the survey found, at once or into the store, from the row on up to which earlier tries have come.

        ``sent`` and ``held`` count what was confirmed, also after an error; ``earlier`` what was before.

        :param dry_run: only count what would be sent.
        :param marks: keeps how far it has come, after every 2000 messages. Without it all is sent.
        :raises SendFailed: some messages were not confirmed.
        :raises InputError: something is wrong that the survey could not see, and nothing was sent yet.
        :raises Interrupted: the same after something was sent, or the source changed meanwhile.
        """
        self.source.check_unchanged()
        self.start = self._start(None if marks is None else marks.get(), found)
        kept = self.route.delivery.kept_open() if isinstance(self.route.delivery, KeepsOpen) else nullcontext()
        try:
            with kept:
                good = self._deliver(found, dry_run, marks)
            self.source.check_unchanged()
        except InputError as error:
            if dry_run or not (self.sent.sent + self.held.sent + self.held.replaced):
                raise
            raise Interrupted(self.sent.sent, self.held.sent + self.held.replaced, str(error)) from error
        if good != found.good:
            why = f"source {self.source.name} had {found.good:,} good rows when it was checked, and then {good:,}"
            raise Interrupted(self.sent.sent, self.held.sent, why)
        self._note(marks, found.rows)

    def _start(self, mark: Mark | None, found: Survey) -> Mark:
        fingerprint = str(found.fingerprint)
        if mark is None or not mark.rows:
            return Mark(fingerprint=fingerprint)
        if mark.fingerprint != fingerprint:
            self.log.warning(
                "an earlier try had confirmed %s rows, but rows or arguments are not what they were then: all are sent"
                " from the top; what is as it was has the same id",
                f"{mark.rows:,}",
            )
            return Mark(fingerprint=fingerprint)
        self.log.info(
            "goes on after %s of %s rows that an earlier try had confirmed", f"{mark.rows:,}", f"{found.rows:,}"
        )
        return mark

    def _deliver(self, found: Survey, dry_run: bool, marks: Marks | None) -> int:
        direct: list[DelayedMessage] = []
        held: list[DelayedMessage] = []
        good = 0
        for number, item in self._items(self._reader(), None):
            if isinstance(item, Problem):
                continue
            try:
                self.route.check(item, self._judged_at)
            except InvalidMessage:
                continue  # the survey set it aside
            good += 1
            if self.past_due == "skip" and self._is_past(item):
                self.skipped += 1
                continue
            if number in found.repeats.copies:
                continue
            if number < self.start.rows:
                self.earlier.add(item)
                continue
            waits = held if self.route.holds(item, self.clock()) else direct
            waits.append(item)
            if len(waits) >= CHUNK:
                self._flush(direct, held, dry_run)
                self._note(marks, number + 1)
                self._progress("sent", number + 1, found.rows)
        self._flush(direct, held, dry_run)
        return good

    def _note(self, marks: Marks | None, rows: int) -> None:
        if marks is not None:
            marks.keep(self.start.after(rows, self.sent, self.held))

    def _flush(self, direct: list[DelayedMessage], held: list[DelayedMessage], dry_run: bool) -> None:
        if self._separate and direct:
            # what the store knows stays the store's: it tells a copy from a change, and nothing is sent twice
            assert self.route.store is not None
            known = self.route.store.known([message.message_id for message in direct])
            held += (message for message in direct if message.message_id in known)
            direct[:] = [message for message in direct if message.message_id not in known]
        # what is due sooner goes first
        for delivery, messages, report in (
            (self.route.delivery, direct, self.sent),
            (self.route.store, held, self.held),
        ):
            if dry_run:
                for message in messages:
                    report.add(message)
            elif messages:
                assert delivery is not None
                _hand_over(delivery, messages, report)
            messages.clear()

    def _progress(self, done: str, count: int, total: int | None = None) -> None:
        if time.monotonic() - self._told >= PROGRESS_SECONDS:
            if self._told:
                self.log.info("%s %s%s rows", done, f"{count:,}", "" if total is None else f" of {total:,}")
            self._told = time.monotonic()


def _hand_over(delivery: DelayedDelivery, messages: list[DelayedMessage], report: SendReport) -> None:
    try:
        report.merge(delivery.send(messages))
    except DelayedError as error:
        partly = getattr(error, "report", None)
        if isinstance(partly, SendReport):
            report.merge(partly)
        raise
