"""From a source of rows to confirmed messages: everything is checked in a first pass, and sent in a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from airflow_delayed.confirmed import send_and_note
from airflow_delayed.delivery import Clock, SendReport
from airflow_delayed.errors import SHOWN, InputError, Interrupted, InvalidMessage
from airflow_delayed.garbage import seldom_collected
from airflow_delayed.identity import digest_of
from airflow_delayed.intake.batch import Batch, row_of
from airflow_delayed.intake.columns import Wanted
from airflow_delayed.intake.ledger import Ledger, Repeats
from airflow_delayed.intake.rows import Problem, RowReader
from airflow_delayed.intake.sieve import Sieve
from airflow_delayed.intake.sources import Source
from airflow_delayed.mark import Mark, Marks, fingerprint
from airflow_delayed.message import UTC, DelayedMessage
from airflow_delayed.route import Route
from airflow_delayed.survey import Survey

if TYPE_CHECKING:
    from airflow_delayed.intake.checked import Checked

#: Messages given to a transport at a time; no more may come twice when a task is killed and tried again.
CHUNK = 2500
#: Messages of which it is told at a time which way they go.
AT_ONCE = 256
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
    :param stopped: whether the task has been ended; looked at before each batch of rows and each block of messages.
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
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.source = source
        self.wanted = wanted
        self.route = route
        self.past_due = past_due
        # what lies more than that back is before all that a calendar has
        self.oldest = began - max_past if max_past < began - _FIRST else _FIRST
        self.max_past = max_past
        self.began = began
        self.clock = clock
        self.log = log
        self.way = way
        self.stopped = stopped
        #: What this try has sent and stored.
        self.sent = SendReport()
        self.held = SendReport()
        self.skipped = 0
        #: Where this try began, and which messages earlier tries had confirmed.
        self.start = Mark()
        self.earlier = SendReport()
        self._good = 0
        self._reader = reader
        self._horizon = route.delivery.horizon
        self._ask: dict[str, bytes] = {}
        self._told = 0.0
        # limits are judged by one moment, so that both passes set the same rows aside
        self._judged_at = clock()

    def first_due(self, enough: datetime) -> datetime | None:
        """Return when the first message is due, or one that is due by ``enough``, or None if there is none.

        Rows that break a rule are left out here: the survey judges them.
        """
        first: datetime | None = None
        for _, item in self._items(self._reader()):
            if isinstance(item, Problem) or self._skips(item):
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
        found = Survey()
        reader = self._reader()
        sieve = Sieve()
        try:
            for number, batch in self._batches():
                found.note_place(number, batch)
                found.rows += batch.size
                checked = reader.check(batch)
                if checked is None or not self._look_at_all(checked, found, sieve):
                    items = reader.by_row(batch) if checked is None else checked.messages()
                    for place, item in enumerate(items, number):
                        self._look(item, place, found, sieve, set_aside)
                self._progress("checked", found.rows)
            self._ask_store(found)
            again = sieve.again()
        finally:
            sieve.close()
        if again:
            found.repeats = self._repeats(again, found)
        found.judge(
            invalid_rows_fail=set_aside is None,
            stale_rows_fail=self.past_due == "fail",
            max_past=self.max_past,
            began=self.began,
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

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        number = 0
        for batch in self.source.batches(self.wanted):
            self._check_stopped()
            yield number, batch
            number += batch.size

    def _check_stopped(self) -> None:
        if self.stopped():
            raise Interrupted(self.sent.sent, self.held.sent, "the task was ended")

    def _items(self, reader: RowReader) -> Iterator[tuple[int, DelayedMessage | Problem]]:
        for number, batch in self._batches():
            yield from enumerate(reader.read(batch), number)

    def _repeats(self, again: set[int], found: Survey) -> Repeats:
        """Read the rows once more to tell what repeats an id, of those whose ids have these hashes."""
        ledger = Ledger()
        try:
            for number, item in self._items(self._reader()):
                if isinstance(item, Problem) or hash(item.message_id) not in again or self._skips(item):
                    continue
                if self._refusal(item, number, found) is None:
                    ledger.add(item.message_id, digest_of(item), number)
            return ledger.repeats()
        finally:
            ledger.close()

    def _look_at_all(self, checked: Checked, found: Survey, sieve: Sieve) -> bool:
        """Count rows at once, unless something is special about one of them."""
        extremes = checked.extremes()
        if extremes.first_due < self.oldest or not self.route.fits(extremes, self._judged_at):
            return False
        found.note_all(checked, self.route, self._horizon, self.clock())
        ids = checked.message_ids()
        sieve.add(ids)
        if self.route.store is not None:
            self._note_digests(zip(ids, checked.digests(), strict=True), found)
        return True

    def _note_digests(self, digests: Iterable[tuple[str, bytes]], found: Survey) -> None:
        for message_id, digest in digests:
            # what is due soon may wait in the store from an earlier run
            self._ask[message_id] = digest
            if len(self._ask) >= ASKED:
                self._ask_store(found)

    def _look(
        self,
        item: DelayedMessage | Problem,
        number: int,
        found: Survey,
        sieve: Sieve,
        set_aside: Callable[[Problem], None] | None,
    ) -> None:
        problem = item if isinstance(item, Problem) else self._refusal(item, number, found)
        if problem is not None:
            found.problem_count += 1
            if len(found.problems) < SHOWN:
                found.problems.append(problem)
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
                return
        now = self.clock()
        sieve.add((item.message_id,))
        if self.route.store is not None:
            self._note_digests([(item.message_id, digest_of(item))], found)
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

    def _skips(self, message: DelayedMessage) -> bool:
        return self.past_due == "skip" and self._is_past(message)

    def _is_past(self, message: DelayedMessage) -> bool:
        return message.due_at < self.oldest

    def deliver(self, found: Survey, *, dry_run: bool = False, marks: Marks | None = None) -> None:
        """Send what the survey found, at once or into the store, from the row on up to which earlier tries have come.

        ``sent`` and ``held`` count what was confirmed, also after an error; ``earlier`` what was before.

        :param dry_run: only count what would be sent.
        :param marks: keeps how far it has come, after every 2500 messages. Without it all is sent.
        :raises SendFailed: some messages were not confirmed.
        :raises InputError: something is wrong that the survey could not see, and nothing was sent yet.
        :raises Interrupted: the same after something was sent, or the source changed meanwhile.
        """
        self.source.check_unchanged()
        if marks is not None and self.source.fingerprint() is None:
            self.log.warning(
                "the file system of %s has no times or hashes of its files, so that a changed file may look like the"
                " old one: no checkpoint is kept, and a retry sends all from the top, with the same ids",
                self.source.name,
            )
            marks = None
        if marks is not None:
            self.start = self._start(marks.get(), found)
        try:
            with seldom_collected(), self.route.delivery.kept_open():
                good = self._deliver(found, dry_run, marks)
            self.source.check_unchanged()
        except InputError as error:
            if dry_run or not (self.start.messages + self.sent.sent + self.held.sent + self.held.replaced):
                raise
            raise Interrupted(self.sent.sent, self.held.sent + self.held.replaced, str(error)) from error
        if good != found.good:
            why = f"source {self.source.name} had {found.good:,} good rows when it was checked, and then {good:,}"
            raise Interrupted(self.sent.sent, self.held.sent, why)
        self._mark(marks, found.rows)

    def _start(self, mark: Mark | None, found: Survey) -> Mark:
        # with what this try judged otherwise, rows below the mark are not those that were sent
        rules = (self._reader().rules, self.wanted, self.past_due, self.max_past)
        judged = (found.rows, found.good, found.problem_count, found.past_due if self.past_due == "skip" else 0)
        now = fingerprint(self.way, self.source.fingerprint() or b"", repr((rules, judged)).encode())
        if mark is None or not mark.rows:
            return Mark(fingerprint=now)
        if mark.fingerprint != now:
            self.log.warning(
                "an earlier try had confirmed %s rows, but the source or arguments are not what they were then: all is"
                " sent from the top; what is as it was has the same id",
                f"{mark.rows:,}",
            )
            return Mark(fingerprint=now)
        self.log.info(
            "goes on after %s of %s rows that an earlier try had confirmed", f"{mark.rows:,}", f"{found.rows:,}"
        )
        return mark

    def _mark(self, marks: Marks | None, rows: int) -> None:
        if marks is not None:
            marks.keep(self.start.after(rows, self.sent, self.held))

    def _deliver(self, found: Survey, dry_run: bool, marks: Marks | None) -> int:
        direct: list[DelayedMessage] = []
        held: list[DelayedMessage] = []
        for rows, some in self._left(self._going(found)):
            self._check_stopped()
            # by the clock of now: what was far off in the survey may be near when its turn comes
            near, far = self.route.parted(some, self.clock())
            direct += near
            held += far
            if max(len(direct), len(held)) + AT_ONCE > CHUNK:
                self._flush(direct, held, dry_run)
                self._mark(marks, rows)
                self._progress("sent", rows, found.rows)
        self._flush(direct, held, dry_run)
        return self._good

    def _left(self, going: Iterable[tuple[int, list[DelayedMessage]]]) -> Iterator[tuple[int, list[DelayedMessage]]]:
        """Count what earlier tries had confirmed, and yield the others."""
        for rows, some in going:
            if rows <= self.start.rows:
                self.earlier.add_all(some)
            else:
                yield rows, some

    def _going(self, found: Survey) -> Iterator[tuple[int, list[DelayedMessage]]]:
        """Yield what is sent, as the survey judged it, some at a time, with the number of rows up to there."""
        reader = self._reader()
        special = found.problem_count or found.repeats.copies or (found.past_due and self.past_due == "skip")
        for number, batch in self._batches():
            checked = None if special else reader.check(batch)
            if checked is not None:
                self._good += checked.size
                for block in checked.blocks():
                    number += len(block)
                    yield number, block
            else:
                items = self._chosen(enumerate(reader.read(batch), number), found)
                while some := list(islice(items, AT_ONCE)):
                    yield some[-1][0] + 1, [message for _, message in some]

    def _chosen(
        self, items: Iterable[tuple[int, DelayedMessage | Problem]], found: Survey
    ) -> Iterator[tuple[int, DelayedMessage]]:
        for number, item in items:
            if isinstance(item, Problem):
                continue
            if found.problem_count and self._refusal(item, number, found):
                continue  # the survey set it aside
            self._good += 1
            if self._skips(item):
                self.skipped += 1
            elif number not in found.repeats.copies:
                yield number, item

    def _flush(self, direct: list[DelayedMessage], held: list[DelayedMessage], dry_run: bool) -> None:
        self.route.leave_known(direct, held)
        # what is due sooner goes first
        for delivery, messages, report in (
            (self.route.delivery, direct, self.sent),
            (self.route.store, held, self.held),
        ):
            if dry_run:
                report.add_all(messages)
            elif messages:
                assert delivery is not None
                note = self.route.store.note_sent if self.route.store is not None and messages is direct else None
                send_and_note(delivery, messages, report, note)
            messages.clear()

    def _progress(self, done: str, count: int, total: int | None = None) -> None:
        if time.monotonic() - self._told >= PROGRESS_SECONDS:
            if self._told:
                self.log.info("%s %s%s rows", done, f"{count:,}", "" if total is None else f" of {total:,}")
            self._told = time.monotonic()
