"""What can go wrong, one class for each; the text of an error says what to do about it.

Failures are of three kinds, never mixed: the input's (:class:`InputError`, raised before anything is sent), the
connection's (:class:`TransportUnavailable`), and single messages' (:class:`SendFailed`, which names each).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence

from airflow_delayed.reports import SendReport, TopologyReport

#: How many single cases the text of an error shows; the rest is counted.
SHOWN = 5


def one_line(text: str) -> str:
    """Return a text that cannot end a line of a log: what is not printable in it is escaped."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def some(cases: Sequence[str], *, separator: str = "; ") -> str:
    """Join the first few cases, each on one line, and count the rest."""
    shown = separator.join(map(one_line, cases[:SHOWN]))
    return shown if len(cases) <= SHOWN else f"{shown}{separator}and {len(cases) - SHOWN:,} more"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120


def short(value: object) -> str:
    """Return a value as an error may show it: what is long has its middle left out."""
    try:
        return _SHORT.repr(value)
    except (RecursionError, ValueError):
        # a whole number of thousands of digits, for one
        return f"a {type(value).__name__} too large to be shown"


class DelayedError(Exception):
    """The base of all errors of this package."""


class InvalidOption(DelayedError):
    """An option of the section ``[delayed]`` in Airflow's configuration cannot be read."""

    def __init__(self, option: str, text: str, advice: str) -> None:
        super().__init__(
            f"option {option} in section [delayed] of Airflow's configuration is {text!r}; {advice}"
            f" (airflow.cfg, or the environment's AIRFLOW__DELAYED__{option.upper()})"
        )
        self.option = option


class InputError(DelayedError):
    """The input cannot be sent as it is. Nothing was sent."""


class InvalidMessage(InputError):
    """One message breaks a rule. ``column`` is the field that is at fault."""

    def __init__(self, column: str, problem: str) -> None:
        super().__init__(f"{column}: {problem}")
        self.column = column
        self.problem = problem


class LimitExceeded(InvalidMessage):
    """A message is beyond what its transport can carry: its delay, its size or its destination's name."""


class NaiveTime(InvalidMessage):
    """A due time without a time zone, which would be a guess."""

    def __init__(self, column: str, value: object, *, advice: str = "give it an offset, or set timezone=") -> None:
        super().__init__(column, f"{value} has no time zone; {advice}")


class PastDue(InputError):
    """Rows were due longer ago than ``max_past`` when the task began."""


class SourceError(InputError):
    """A source cannot be read, is incomplete, or changed while it was read."""


class UnsupportedColumns(InputError):
    """A source lacks columns that are needed, or has columns that mean nothing here."""


class MessageConflict(InputError):
    """Two messages have one id and different content, so one of them would pass for a duplicate."""


class DestinationMissing(InputError):
    """Destinations that cannot receive. Nothing was sent."""

    def __init__(self, conn_id: str, destinations: Sequence[str], remedy: str) -> None:
        super().__init__(
            f"connection {conn_id!r} has no destination {some(sorted(destinations), separator=', ')}; {remedy}"
        )
        self.destinations = tuple(destinations)


class TopologyError(DelayedError):
    """What a transport needs is missing or differs from what was wanted. ``report`` has each finding.

    :param remedy: what else to do, if that is not told by the findings.
    :param topology: the name of RabbitMQ's topology that was wanted.
    """

    def __init__(
        self, conn_id: str, report: TopologyReport, remedy: str | None = None, *, topology: str | None = None
    ) -> None:
        problems = [str(finding) for finding in report.problems]
        told = remedy is not None or any(finding.state.name == "DIFFERS" for finding in report.problems)
        if remedy is None:
            mends = any(finding.repair for finding in report.problems)
            remedy = f"what differs {'is changed with repair=True' if mends else 'has to be changed by hand first'}"
        options = f"conn_id={conn_id!r}, " + (f"topology={topology!r}, ..." if topology else "...")
        destinations = ", with create_destinations=True destinations too" if report.missing_destinations else ""
        super().__init__(
            f"connection {conn_id!r} is not ready: {some(problems)}. TopologyInstallOperator({options}) makes what is"
            f" missing{destinations}; its dry_run=True shows the plan{f'; {remedy}' if told else ''}"
        )
        self.report = report


class MessagesWaiting(DelayedError):
    """Queues were not deleted, since messages wait in them or may do so.

    ``waiting`` counts them by queue; None where some may be stuck in dead-lettering, which could not be seen.
    """

    def __init__(self, conn_id: str, waiting: Mapping[str, int | None], remedy: str) -> None:
        known = {queue: count for queue, count in waiting.items() if count is not None}
        texts = [f"{count:,} in {queue}" for queue, count in known.items()]
        if unseen := [queue for queue in waiting if queue not in known]:
            texts.append(
                f"unknown is how many are stuck in dead-lettering in {some(unseen, separator=', ')}, which the"
                " management API alone tells"
            )
        super().__init__(f"connection {conn_id!r}: messages wait: {some(texts)}. {remedy}")
        self.waiting = dict(waiting)


class RetentionAtRisk(DelayedError):
    """Messages had been in a delay queue for over half of the time after which SQS forgets them."""

    def __init__(self, conn_id: str, queue: str, oldest: int, retention: int) -> None:
        super().__init__(
            f"connection {conn_id!r}: a message had been in {queue} for {oldest / 86_400:.1f} days, and SQS forgets it"
            f" after {retention / 86_400:.1f}. Those that could be sent on were; what could not is named in the log."
            " Let a FifoCycleSensor run all the time (schedule='@continuous', max_active_runs=1, not paused), mend what"
            " the log names, and give the queue a MessageRetentionPeriod of 1209600, the longest there is. Then run"
            " this task again"
        )
        self.oldest = oldest
        self.retention = retention


class Interrupted(DelayedError):
    """Sending stopped half-way. A retry sends the same messages with the same ids."""

    def __init__(self, sent: int, held: int, why: str) -> None:
        super().__init__(
            f"sending stopped after {sent:,} messages were sent and {held:,} stored: {why}. A retry sends the same"
            " messages again, with the same ids"
        )


class UnsupportedConnection(DelayedError):
    """No transport is known for a connection's type."""

    def __init__(self, conn_id: str, conn_type: str | None, known: Sequence[str]) -> None:
        super().__init__(
            f"connection {conn_id!r} is of type {conn_type!r}, which no transport serves; use one of"
            f" {', '.join(known)}, or a package that offers it (entry point group 'airflow_delayed.delivery')"
        )


class UnsupportedOption(InputError):
    """A transport was given options that another one has."""

    def __init__(self, conn_id: str, conn_type: str | None, options: Sequence[str]) -> None:
        super().__init__(
            f"connection {conn_id!r} is of type {conn_type!r}, which has no {some(options, separator=', ')}; leave it"
            " out, or use a connection of the type that has it (for topologies: rabbitmq)"
        )
        self.options = tuple(options)


class TransportUnavailable(DelayedError):
    """The broker or database could not be reached, or the connection was lost and did not come back.

    ``report`` counts what was confirmed before, where that is known.
    """

    report: SendReport | None = None


class AccessDenied(TransportUnavailable):
    """The role of a connection may not do what is needed. ``actions`` names what to allow, on which ``queue``."""

    def __init__(self, conn_id: str, actions: Sequence[str], queue: str | None, doing: str, answer: str) -> None:
        where = f"queue {queue}" if queue else "the queue"
        super().__init__(
            f"connection {conn_id!r} could not {doing}: its role may not do {' and '.join(actions)} on {where}. Allow"
            f" it in the role's policy, and in the queue's own or the key's if that denies it. SQS answered {answer}"
        )
        self.actions = tuple(actions)
        self.queue = queue


class SendFailed(DelayedError):
    """Some messages were not confirmed. ``report`` counts those that were; ``failures`` has a reason by message id.

    Sending the same messages again is safe: their ids stay the same, so a duplicate can be recognised.
    """

    def __init__(self, conn_id: str, report: SendReport, failures: Sequence[tuple[str, str]]) -> None:
        cases = [f"message {message_id}: {reason}" for message_id, reason in failures]
        super().__init__(
            f"connection {conn_id!r} confirmed {report.sent:,} messages and not {len(failures):,}: {some(cases)}."
            " Those not named may be sent again with the same ids by a retry"
        )
        self.report = report
        self.failures = tuple(failures)
