"""From a source of rows to confirmed messages: everything is checked in a first pass, and sent in a second.

:class:`PreflightReport` is the result of the first pass, and whether the rows may be sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from airflow_delayed.delivery import Clock, SendReport
from airflow_delayed.errors import (
    SHOWN,
    DelayedError,
    InputError,
    Interrupted,
    InvalidMessage,
    MessageConflict,
    PastDue,
    SendFailed,
    some,
)
from airflow_delayed.identity import digest_of
from airflow_delayed.intake.columns import ColumnRules, RowBatch
from airflow_delayed.intake.duplicates import DuplicateFilter, DuplicateIndex, Duplicates
from airflow_delayed.intake.rows import Problem, RowReader
from airflow_delayed.intake.sources import Source
from airflow_delayed.message import MICROSECOND, UTC, DelayedMessage, microseconds
from airflow_delayed.reports import Checkpoint
from airflow_delayed.route import Route, confirmed_messages
from airflow_delayed.threads import relaxed_gc

if TYPE_CHECKING:
    from airflow_delayed.intake.columnar import ColumnarRows, DueCounts

#: Up to so many messages a send names their ids.
MOST_IDS = 100


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
    #: The ids of the first messages, copies too: up to one more than :data:`MOST_IDS`.
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
        return None if len(self.first_ids) > MOST_IDS else list(dict.fromkeys(self.first_ids))

    def note_place(self, number: int, batch: RowBatch) -> None:
        """Note where the rows of a batch come from."""
        if batch.size:
            self.places.append((number, batch.origin, batch.first_row))

    def note(self, message: DelayedMessage, route: Route, horizon: timedelta, now: datetime) -> None:
        """Count a message that is within all limits and is sent or stored."""
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
        if len(self.first_ids) <= MOST_IDS:
            self.first_ids.append(message.message_id)

    def note_all(self, checked: ColumnarRows, route: Route, horizon: timedelta, now: datetime) -> None:
        """Count messages that are within all limits and not past due."""
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
        if len(self.first_ids) <= MOST_IDS:
            self.first_ids += checked.first(MOST_IDS + 1 - len(self.first_ids)).message_ids()

    def judge(self, *, invalid_rows_fail: bool, stale_rows_fail: bool, max_past: timedelta, began: datetime) -> None:
        """Raise an error if something is wrong, so that nothing is sent."""
        if self.problem_count and invalid_rows_fail:
            raise InputError(
                f"{self.problem_count:,} of {self.rows:,} rows cannot be sent, so nothing was sent:"
                f" {some([str(problem) for problem in self.problems])}"
                f"{_more(self.problem_count - len(self.problems))}."
                " Mend them, or pass rejects="
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


#: The number of rows of the source up to the end of the block, and the messages of the block.
_Block = tuple[int, list[DelayedMessage]]
#: The most messages given to a transport at a time, so the most that come twice when a task is killed and retried.
CHUNK = 2500
#: Messages that are routed at a time.
AT_ONCE = 256
_FIRST = datetime.min.replace(tzinfo=UTC)
#: Ids asked of the store at a time.
ASKED = 1000
#: Seconds between two lines of progress in the log.
PROGRESS_SECONDS = 10.0


class Log(Protocol):
    """A logger of Airflow's or Python's."""

    def info(self, event: str, /, *args: Any) -> Any:
        """Log progress."""
        ...

    def warning(self, event: str, /, *args: Any) -> Any:
        """Log a condition that the user should look at."""
        ...


class Checkpoints(Protocol):
    """Keeps the checkpoint of a send from one try to the next."""

    def get(self) -> Checkpoint | None:
        """Return the last checkpoint."""
        ...

    def keep(self, checkpoint: Checkpoint) -> None:
        """Replace the last checkpoint. Raises nothing, for the messages are sent already."""
        ...


def fingerprint(*parts: bytes) -> str:
    """Return a digest of a source, of the meaning of its rows, and of the way that its messages go."""
    whole = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return blake2b(whole, digest_size=16, person=b"delayed source 1").hexdigest()


class Sending:
    """One send: its source, its rules, its route.

    :param past_due: "fail", "send" or "skip" messages due more than ``max_past`` before ``began``.
    :param began: when the first try of this send began.
    :param way: a digest of the connections and options of the send.
    :param stopped: whether the task has been ended; called before each batch of rows and each block of messages.
    :param asks: ask the store in the first pass for ids that it has with other content.
    """

    def __init__(
        self,
        source: Source,
        wanted: ColumnRules,
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
        asks: bool = True,
    ) -> None:
        self.source = source
        self.wanted = wanted
        self.route = route
        self.past_due = past_due
        # Python has no time before the year 1
        self.oldest = began - max_past if max_past < began - _FIRST else _FIRST
        self.max_past = max_past
        self.began = began
        self.clock = clock
        self.log = log
        self.way = way
        self.stopped = stopped
        self.asks = asks
        #: Counts of what this try has sent and stored.
        self.sent = SendReport()
        self.stored = SendReport()
        self.skipped = 0
        #: How many messages the transport itself refused for good, as for a body that is larger than its broker takes.
        self.refused = 0
        self._refusals: list[Problem] = []
        #: The checkpoint that this try began with, and counts of the messages that earlier tries had confirmed.
        self.start = Checkpoint()
        self.earlier = SendReport()
        self._good = 0
        self._away: DelayedError | None = None
        self._reader = reader
        self._horizon = route.delivery.horizon
        self._ask: dict[str, bytes] = {}
        self._logged_at = 0.0
        # limits are judged by one moment, so that both passes reject the same rows
        self._judged_at = clock()

    def preflight(self, *, reject: Callable[[Problem], None] | None = None) -> PreflightReport:
        """Read everything once and send nothing.

        :raises InputError: something is wrong with the source, with rows, or with what they say together.
        """
        found = PreflightReport()
        reader = self._reader()
        ids_seen = DuplicateFilter()
        wall_clocks: dict[str, str] = {}
        try:
            for number, batch in self._batches():
                found.note_place(number, batch)
                found.rows += batch.size
                wall_clocks.update(batch.wall_clocks)
                checked = reader.check(batch)
                if checked is None or not self._check_batch(checked, found, ids_seen):
                    items = reader.by_row(batch) if checked is None else checked.messages()
                    for place, item in enumerate(items, number):
                        self._check_item(item, place, found, ids_seen, reject)
                self._progress("checked", found.rows)
            self._ask_store(found)
            repeated = ids_seen.repeated()
        finally:
            ids_seen.close()
        if repeated:
            found.duplicates = self._duplicates(repeated, found)
        found.judge(
            invalid_rows_fail=reject is None,
            stale_rows_fail=self.past_due == "fail",
            max_past=self.max_past,
            began=self.began,
        )
        zone = reader.rules.zone
        for name, because in wall_clocks.items():
            read_in = "its row's zone" if zone is None else f"{zone.key}, where its row has no zone of its own"
            self.log.info("column %s has no time zone (%s): it is read in %s", name, because, read_in)
        shifts = reader.shifts
        if shifts.gaps or shifts.folds:
            self.log.warning(
                "daylight saving: %s local times that a gap skips were moved later; of %s that happen twice the first"
                " was taken",
                f"{shifts.gaps:,}",
                f"{shifts.folds:,}",
            )
        return found

    def _batches(self) -> Iterator[tuple[int, RowBatch]]:
        number = 0
        for batch in self.source.batches(self.wanted):
            self._check_stopped()
            yield number, batch
            number += batch.size

    def _check_stopped(self) -> None:
        if self.stopped():
            raise Interrupted(self.sent.sent, self.stored.sent, "the task was ended")

    def _items(self, reader: RowReader) -> Iterator[tuple[int, DelayedMessage | Problem]]:
        for number, batch in self._batches():
            yield from enumerate(reader.read(batch), number)

    def _duplicates(self, hashes: set[int], found: PreflightReport) -> Duplicates:
        index = DuplicateIndex()
        try:
            for number, item in self._items(self._reader()):
                if isinstance(item, Problem) or hash(item.message_id) not in hashes or self._skips(item):
                    continue
                if self._refusal(item, number, found) is None:
                    index.add(item.message_id, digest_of(item), number)
            return index.duplicates()
        finally:
            index.close()

    def _check_batch(self, checked: ColumnarRows, found: PreflightReport, ids_seen: DuplicateFilter) -> bool:
        """Count a batch's rows at once and return True; False if one of them is past due or may be beyond a limit."""
        bounds = checked.bounds()
        if bounds.first_due < self.oldest or not self.route.fits(bounds, self._judged_at):
            return False
        found.note_all(checked, self.route, self._horizon, self.clock())
        ids = checked.message_ids()
        ids_seen.add(ids)
        if self.route.store is not None:
            self._compare_with_store(zip(ids, checked.digests(), strict=True), found)
        return True

    def _compare_with_store(self, digests: Iterable[tuple[str, bytes]], found: PreflightReport) -> None:
        for message_id, digest in digests:
            # also of messages that are due soon: an earlier run may have stored them
            self._ask[message_id] = digest
            if len(self._ask) >= ASKED:
                self._ask_store(found)

    def _check_item(
        self,
        item: DelayedMessage | Problem,
        number: int,
        found: PreflightReport,
        ids_seen: DuplicateFilter,
        reject: Callable[[Problem], None] | None,
    ) -> None:
        problem = item if isinstance(item, Problem) else self._refusal(item, number, found)
        if problem is not None:
            found.problem_count += 1
            if len(found.problems) < SHOWN:
                found.problems.append(problem)
            if reject is not None:
                reject(problem)
            return
        assert isinstance(item, DelayedMessage)
        found.good += 1
        if self._is_past(item):
            found.past_due += 1
            if found.first_past is None:
                found.first_past = f"{found.place(number)}, due {item.due_at:%Y-%m-%d %H:%M:%S} UTC"
            if self.past_due == "skip":
                return
        ids_seen.add((item.message_id,))
        if self.route.store is not None:
            self._compare_with_store([(item.message_id, digest_of(item))], found)
        found.note(item, self.route, self._horizon, self.clock())

    def _ask_store(self, found: PreflightReport) -> None:
        if self._ask and self.asks and self.route.store is not None and len(found.conflicts) < SHOWN:
            found.conflicts += self.route.store.conflicting(self._ask)
        self._ask.clear()

    def _refusal(self, message: DelayedMessage, number: int, found: PreflightReport) -> Problem | None:
        try:
            self.route.check(message, self._judged_at)
        except InvalidMessage as error:
            column = self.wanted.label(error.column)
            return Problem(found.place(number), column, error.problem, self.wanted.row_of(message))
        return None

    def _skips(self, message: DelayedMessage) -> bool:
        return self.past_due == "skip" and self._is_past(message)

    def _is_past(self, message: DelayedMessage) -> bool:
        return message.due_at < self.oldest

    def deliver(
        self,
        found: PreflightReport,
        *,
        dry_run: bool = False,
        checkpoints: Checkpoints | None = None,
        reject: Callable[[Problem], None] | None = None,
    ) -> None:
        """Send the messages of the preflight, at once or into the store, but for the rows that earlier tries confirmed.

        A message that the transport refuses for good is left out, so that the others are sent. ``sent`` and ``stored``
        count the messages that were confirmed, also after an error; ``earlier`` those of earlier tries.

        :param checkpoints: keeps a checkpoint after every 2500 messages. Without it all is sent.
        :param reject: takes the rows that the transport refuses for good; without it they are an error at the end.
        :raises SendFailed: some messages were not confirmed.
        :raises TransportUnavailable: the broker is away. What waits in a store in front of it is stored.
        :raises InputError: something is wrong that the preflight could not see, and nothing was sent yet; or the
            transport refused messages for good, and the others were sent.
        :raises Interrupted: the same after something was sent, or the source changed meanwhile.
        """
        self.source.check_unchanged()
        if checkpoints is not None and self.source.fingerprint() is None:
            self.log.warning(
                "the file system of %s has no times or hashes of its files, so that a changed file may look like the"
                " old one: no checkpoint is kept, and a retry sends all from the top, with the same ids",
                self.source.name,
            )
            checkpoints = None
        if checkpoints is not None:
            self.start = self._start(checkpoints.get(), found)
        try:
            with relaxed_gc(), self.route.delivery.kept_open():
                good = self._send_all(found, dry_run, checkpoints, reject)
            self.source.check_unchanged()
        except InputError as error:
            if dry_run or not (self.start.messages + self.sent.sent + self.stored.sent + self.stored.replaced):
                raise
            raise Interrupted(self.sent.sent, self.stored.sent + self.stored.replaced, str(error)) from error
        if good != found.good:
            why = f"source {self.source.name} had {found.good:,} good rows when it was checked, and then {good:,}"
            raise Interrupted(self.sent.sent, self.stored.sent, why)
        self._keep_checkpoint(checkpoints, found.rows)
        if self.refused and reject is None:
            raise InputError(
                f"{self.refused:,} of {found.rows:,} rows cannot be sent:"
                f" {some([str(problem) for problem in self._refusals])}{_more(self.refused - len(self._refusals))}. All"
                " others were sent. Mend them, or pass rejects="
            )

    def _start(self, checkpoint: Checkpoint | None, found: PreflightReport) -> Checkpoint:
        """Return the checkpoint of the earlier try if it holds for this one, else an empty one.

        It holds if source and arguments are the same, and if this try accepts and skips as many rows: otherwise the
        first rows are no longer the rows that were sent.
        """
        rules = (self._reader().rules, self.wanted, self.past_due, self.max_past)
        judged = (found.rows, found.good, found.problem_count, found.past_due if self.past_due == "skip" else 0)
        now = fingerprint(self.way, self.source.fingerprint() or b"", repr((rules, judged)).encode())
        if checkpoint is None or not checkpoint.rows:
            return Checkpoint(fingerprint=now)
        if checkpoint.fingerprint != now:
            self.log.warning(
                "an earlier try had confirmed %s rows, but the source or arguments are not what they were then: all is"
                " sent from the top; what is as it was has the same id",
                f"{checkpoint.rows:,}",
            )
            return Checkpoint(fingerprint=now)
        self.log.info(
            "goes on after %s of %s rows that an earlier try had confirmed", f"{checkpoint.rows:,}", f"{found.rows:,}"
        )
        return checkpoint

    def _keep_checkpoint(self, checkpoints: Checkpoints | None, rows: int) -> None:
        # a retry after a checkpoint would not find again what was refused before it
        if checkpoints is not None and not self.refused:
            checkpoints.keep(self.start.after(rows, self.sent, self.stored))

    def _send_all(
        self,
        found: PreflightReport,
        dry_run: bool,
        checkpoints: Checkpoints | None,
        reject: Callable[[Problem], None] | None,
    ) -> int:
        direct: list[DelayedMessage] = []
        to_store: list[DelayedMessage] = []
        for rows, block in self._without_confirmed(self._blocks(found)):
            self._check_stopped()
            # by the present clock: a message far from due in the preflight may be near when its turn comes
            near, far = self.route.split(block, self.clock())
            direct += near
            to_store += far
            if max(len(direct), len(to_store)) + AT_ONCE > CHUNK:
                self._flush(direct, to_store, dry_run, reject)
                if self._away is None:
                    self._keep_checkpoint(checkpoints, rows)
                self._progress("sent", rows, found.rows)
        self._flush(direct, to_store, dry_run, reject)
        if self._away is not None:
            stored = self.stored.sent + self.stored.duplicates + self.stored.replaced
            self._away.args = (
                f"{self._away}. What is due now, or within hold_over, failed; {stored:,} messages are stored. A retry"
                " sends the rest",
            )
            raise self._away
        return self._good

    def _without_confirmed(self, blocks: Iterable[_Block]) -> Iterator[_Block]:
        for rows, block in blocks:
            if rows <= self.start.rows:
                self.earlier.add_all(block)
            else:
                yield rows, block

    def _blocks(self, found: PreflightReport) -> Iterator[_Block]:
        reader = self._reader()
        special = found.problem_count or found.duplicates.copies or (found.past_due and self.past_due == "skip")
        for number, batch in self._batches():
            checked = None if special else reader.check(batch)
            if checked is not None:
                self._good += checked.size
                for block in checked.blocks():
                    number += len(block)
                    yield number, block
            else:
                items = self._accepted(enumerate(reader.read(batch), number), found)
                while taken := list(islice(items, AT_ONCE)):
                    yield taken[-1][0] + 1, [message for _, message in taken]

    def _accepted(
        self, items: Iterable[tuple[int, DelayedMessage | Problem]], found: PreflightReport
    ) -> Iterator[tuple[int, DelayedMessage]]:
        for number, item in items:
            if isinstance(item, Problem):
                continue
            if found.problem_count and self._refusal(item, number, found):
                continue  # the preflight rejected it
            self._good += 1
            if self._skips(item):
                self.skipped += 1
            elif number not in found.duplicates.copies:
                yield number, item

    def _flush(
        self,
        direct: list[DelayedMessage],
        to_store: list[DelayedMessage],
        dry_run: bool,
        reject: Callable[[Problem], None] | None,
    ) -> None:
        self.route.leave_known(direct, to_store)
        if dry_run:
            self.sent.add_all(direct)
            self.stored.add_all(to_store)
        else:
            while True:
                # a broker that is away is not tried again for each block
                now = [] if self._away is not None else direct
                try:
                    away = self.route.publish(now, to_store, self.clock(), sent=self.sent, stored=self.stored)
                    break
                except (InvalidMessage, SendFailed) as error:
                    self._leave_out(direct, error, reject)
            self._away = self._away or away
        direct.clear()
        to_store.clear()

    def _leave_out(
        self,
        direct: list[DelayedMessage],
        error: InvalidMessage | SendFailed,
        reject: Callable[[Problem], None] | None,
    ) -> None:
        """Leave out the message that the transport refuses for good, and what it has confirmed."""
        cause = error.__cause__ if isinstance(error, SendFailed) else error
        if not isinstance(cause, InvalidMessage) or cause.message_id is None:
            raise error
        refused = [message for message in direct if message.message_id == cause.message_id]
        done = set(map(id, [*refused, *(confirmed_messages(direct, error) if isinstance(error, SendFailed) else ())]))
        if not refused:
            raise error
        for message in refused:
            problem = Problem(f"message {message.message_id}", cause.column, cause.problem, self.wanted.row_of(message))
            self.refused += 1
            if len(self._refusals) < SHOWN:
                self._refusals.append(problem)
            if reject is not None:
                reject(problem)
        direct[:] = [message for message in direct if id(message) not in done]

    def _progress(self, done: str, count: int, total: int | None = None) -> None:
        if time.monotonic() - self._logged_at >= PROGRESS_SECONDS:
            if self._logged_at:
                self.log.info("%s %s%s rows", done, f"{count:,}", "" if total is None else f" of {total:,}")
            self._logged_at = time.monotonic()
