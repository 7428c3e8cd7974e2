"""From what a transport did with messages to what becomes of their rows: handed over, tried again, or given up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import random

from airflow_delayed.backoff import next_sleep
from airflow_delayed.errors import InvalidMessage
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store.alike import Alike
from airflow_delayed.store.error_copy import error_copy
from airflow_delayed.store.handover import Failure, Handover
from airflow_delayed.store.rows import to_message
from airflow_delayed.store.settling import Again, Row, Verdict, shortened

#: Seconds before a message is tried a second time, and at most.
FIRST_RETRY, LONGEST_RETRY = 1.0, 300.0


@dataclass(slots=True)
class Read:
    """The rows of a batch as messages, and those of which nothing can be sent."""

    messages: Sequence[DelayedMessage] = ()
    failures: dict[str, Failure] = field(default_factory=dict)
    expired: list[str] = field(default_factory=list)

    def merge(self, other: Read) -> None:
        """Add what was found in other rows, but for their messages."""
        self.failures.update(other.failures)
        self.expired += other.expired


def read(rows: Sequence[Row], closed: Mapping[str, str], now: datetime) -> Read:
    """Return the messages of rows, without those that have expired, or that go to a closed destination.

    :param closed: destinations that cannot receive, or may not, and why.
    """
    if not closed and (alike := Alike.of(rows)) is not None:
        return Read(alike)
    failures: dict[str, Failure] = {}
    messages, expired = [], []
    for row in rows:
        if row["ExpiresAt"] is not None and row["ExpiresAt"] <= now:
            expired.append(row["Id"])
        elif row["Destination"] in closed:
            failures[row["Id"]] = Failure(closed[row["Destination"]], final=True)
        else:
            try:
                messages.append(to_message(row))
            except InvalidMessage as error:
                failures[row["Id"]] = Failure(str(error), final=True)
    return Read(messages, failures, expired)


@dataclass(frozen=True, slots=True)
class Results:
    """What became of messages, by id."""

    confirmed: Collection[str]
    expired: Collection[str]
    failures: Mapping[str, Failure]

    @classmethod
    def of(cls, found: Read, done: Handover) -> Results:
        """Put together what was found before sending and what came of it."""
        return cls(
            set(done.confirmed),
            {*found.expired, *done.expired},
            {**found.failures, **done.failures},
        )


def judge(
    rows: Sequence[Row],
    results: Results,
    number_of_retries: int,
    now: datetime,
    *,
    chance: Callable[[], float] = random,
) -> Verdict:
    """Return what becomes of each row; what is given up is in ``failed``.

    :param now: when it failed: the next try comes a growing pause later.
    """
    verdict = Verdict(at=now)
    for row in rows:
        name = row["Id"]
        if name in results.confirmed:
            verdict.gone.append(row)
        elif name in results.expired:
            verdict.expired.append(row)
        elif (failure := results.failures.get(name)) is None:
            verdict.untried.append(row)
        elif failure.final or _failures(row) >= number_of_retries:
            verdict.failed.append((row, failure.reason))
        else:
            seconds = next_sleep(_failures(row) + 1, first=FIRST_RETRY, longest=LONGEST_RETRY, chance=chance)
            again = now + timedelta(seconds=seconds)
            verdict.again.append(Again(row, failure.reason, again))
    return verdict


def _failures(row: Row) -> int:
    """Return how often handing a message over failed; somebody else may have written less than none."""
    return max(0, int(row["RetryCount"]))


def copies(verdict: Verdict, error_destination: str, now: datetime) -> list[DelayedMessage]:
    """Return what goes to the error destination: the messages that are given up and can be read."""
    made = []
    for row, reason in verdict.failed:
        try:
            made.append(error_copy(to_message(row), error_destination, shortened(reason), now))
        except InvalidMessage:
            continue  # it goes to the table of failed messages, where it can be looked at
    return made


def set_aside(verdict: Verdict, done: Handover, error_destination: str) -> int:
    """Note what became of the copies; return how many the error destination refused."""
    confirmed = set(done.confirmed)
    left: list[tuple[Row, str]] = []
    refused = 0
    for row, reason in verdict.failed:
        name = row["Id"]
        if name in confirmed:
            verdict.aside.append(row)
        elif name in done.failures:
            refused += 1
            left.append((row, f"{reason}; error destination {error_destination!r}: {done.failures[name].reason}"))
        elif done.lost is not None or done.stopped:
            # as it was: it fails again, and goes there then
            verdict.untried.append(row)
        else:
            left.append((row, reason))
    verdict.failed = left
    return refused
