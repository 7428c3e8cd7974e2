"""The errors of this package; each text has the remedy.

Failures are of three kinds, never mixed: the input's (:class:`InputError`, raised before anything is sent), the
connection's (:class:`TransportUnavailable`), and single messages' (:class:`SendFailed`, which names each).
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec

from airflow_delayed.reports import SendReport, TopologyReport

#: How many single cases the text of an error shows; the rest is counted.
SHOWN = 5


def one_line(text: str) -> str:
    """Return a text whose unprintable characters are escaped, so that it cannot end a line of a log."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Check that an argument has one of its few values.

    :raises ValueError: it has another.
    """
    if value not in (known := tuple(choices)):
        raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, known))}")


def some(cases: Sequence[str], *, separator: str = "; ") -> str:
    """Join the first few cases, each on one line, and count the rest."""
    shown = separator.join(map(one_line, cases[:SHOWN]))
    return shown if len(cases) <= SHOWN else f"{shown}{separator}and {len(cases) - SHOWN:,} more"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120


def short(value: object) -> str:
    """Return a value as an error may show it: of a long one the middle is left out."""
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


class MissingExtra(DelayedError, ImportError):
    """A library is not installed that an extra of this package brings."""

    def __init__(self, what: str, library: str, extra: str) -> None:
        super().__init__(f"{what} cannot be used without {library}: pip install 'airflow-provider-delayed[{extra}]'")


def require(what: str, extra: str, library: str) -> None:
    """Check that the library of an extra is installed, without importing it.

    :raises MissingExtra: it is not.
    """
    if find_spec(library) is None:
        raise MissingExtra(what, library, extra)


class InputError(DelayedError):
    """The input cannot be sent as it is. Nothing was sent."""


class WrongState(InputError, ValueError):
    """The filter of a change has a state whose messages the change leaves as they are. Nothing was changed."""


class WrongToken(InputError, ValueError):
    """``after=`` is no token of such a list or change. Nothing was changed."""


class NullCriterion(InputError):
    """A criterion of a filter was passed, and is None."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name}= is None, which would select more messages, so nothing is changed: did a template, another task,"
            f" or a column of a row return nothing? To select whatever the {name} is, leave {name}= out"
        )


class InvalidMessage(InputError):
    """A message breaks a rule. ``column`` is the wrong field; ``message_id`` is known where a transport found it."""

    message_id: str | None = None

    def __init__(self, column: str, problem: str) -> None:
        super().__init__(f"{column}: {problem}")
        self.column = column
        self.problem = problem


class LimitExceeded(InvalidMessage):
    """A message is beyond a limit of its transport: its delay, its size or its destination's name."""


class NaiveTime(InvalidMessage):
    """A time without a time zone, which would be a guess."""

    def __init__(self, column: str, value: object) -> None:
        super().__init__(column, f"{value} has no time zone; give it an offset, or set timezone=")


class PastDue(InputError):
    """Rows were due longer ago than ``max_past`` when the task began."""


class SourceError(InputError):
    """A source cannot be read, is incomplete, or changed while it was read."""


class SpoolError(DelayedError):
    """The rows of a source cannot be spooled on this machine. Nothing was sent; a retry may run on another one."""

    def __init__(self, name: str, folder: str, why: str) -> None:
        super().__init__(
            f"the rows of {name} cannot be spooled in {folder}: {why}. Nothing was sent. Free space there, or name a"
            " folder on another disk in [delayed] spool_folder"
        )


class UnsupportedColumns(InputError):
    """A source lacks columns that are needed, or has unknown ones."""


class MessageConflict(InputError):
    """Two messages have one id and different content, so one of them would pass for a duplicate.

    ``report`` counts the messages before them that the store took.
    """

    report: SendReport | None = None


class DestinationMissing(InputError):
    """Destinations that cannot receive. Nothing was sent."""

    def __init__(self, conn_id: str, destinations: Sequence[str], remedy: str) -> None:
        super().__init__(
            f"connection {conn_id!r} has no destination {some(sorted(destinations), separator=', ')}; {remedy}"
        )
        self.destinations = tuple(destinations)


class TopologyError(DelayedError):
    """A part of the topology is missing, or differs from the wanted one. ``report`` has each finding.

    :param remedy: a further remedy, besides those of the findings.
    :param topology: the name of RabbitMQ's wanted topology.
    """

    def __init__(
        self, conn_id: str, report: TopologyReport, remedy: str | None = None, *, topology: str | None = None
    ) -> None:
        problems = [str(finding) for finding in report.problems]
        shows_remedy = remedy is not None or any(finding.state.name == "DIFFERS" for finding in report.problems)
        if remedy is None:
            mends = any(finding.repair for finding in report.problems)
            remedy = f"what differs {'is changed with repair=True' if mends else 'has to be changed by hand first'}"
        options = f"conn_id={conn_id!r}, " + (f"topology={topology!r}, ..." if topology else "...")
        destinations = ", with create_destinations=True destinations too" if report.missing_destinations else ""
        super().__init__(
            f"connection {conn_id!r} is not ready: {some(problems)}. TopologyInstallOperator({options}) makes what is"
            f" missing{destinations}; its dry_run=True shows the plan{f'; {remedy}' if shows_remedy else ''}"
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
            f" after {retention / 86_400:.1f}. The others were sent on where they could be; the log names the rest."
            " Let a FifoCycleSensor run all the time (schedule='@continuous', max_active_runs=1, not paused), mend what"
            " the log names, and give the queue a MessageRetentionPeriod of 1209600, the longest there is. Then run"
            " this task again"
        )
        self.oldest = oldest
        self.retention = retention


class Interrupted(DelayedError):
    """Sending stopped half-way. A retry sends the same messages with the same ids."""

    def __init__(self, sent: int, stored: int, why: str) -> None:
        super().__init__(
            f"sending stopped after {sent:,} messages were sent and {stored:,} stored: {why}. A retry sends the same"
            " messages again, with the same ids"
        )


class UnsupportedConnection(DelayedError):
    """No transport is known for a connection's type."""

    def __init__(self, conn_id: str, conn_type: str | None, known: Sequence[str]) -> None:
        super().__init__(
            f"connection {conn_id!r} is of type {conn_type!r}, which no transport serves; use one of"
            f" {', '.join(known)}, or a package that offers it (entry point group 'airflow_delayed.delivery')"
        )


class NotAStore(UnsupportedConnection):
    """The connection is that of a broker, and messages of a store were to be looked up or changed."""

    def __init__(self, conn_id: str, conn_type: str | None) -> None:
        DelayedError.__init__(
            self,
            f"connection {conn_id!r} is of type {conn_type!r}, and no store: a message that a broker has cannot be"
            " looked up, cancelled or changed. Send with store_conn_id=, so that messages wait in a SQL database until"
            " shortly before they are due, and name that SQL connection here: a store is store_conn_id= (on the command"
            " line --store-conn-id), conn_id= is the connection that delivers",
        )


class WrongTransport(UnsupportedConnection):
    """The connection is of a type that another transport serves, such as a store's where a broker's is needed."""

    def __init__(self, conn_id: str, conn_type: str | None, known: Sequence[str]) -> None:
        DelayedError.__init__(
            self,
            f"connection {conn_id!r} is of type {conn_type!r}, and the work here is for one of type"
            f" {', '.join(known)}: name that as conn_id= (on the command line --conn-id), the connection that"
            " delivers; a store is store_conn_id= (--store-conn-id)",
        )


class UnsupportedOption(InputError):
    """The options belong to another transport than that of the connection."""

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
    """The role of a connection lacks permissions: the ``actions`` to allow on ``queue``."""

    def __init__(self, conn_id: str, actions: Sequence[str], queue: str | None, doing: str, answer: str) -> None:
        where = f"queue {queue}" if queue else "the queue"
        super().__init__(
            f"connection {conn_id!r} could not {doing}: its role may not do {' and '.join(actions)} on {where}. Allow"
            f" it in the role's policy, and in the queue's own or the key's if that denies it. SQS answered {answer}"
        )
        self.actions = tuple(actions)
        self.queue = queue


class SendFailed(DelayedError):
    """Some messages were not confirmed. ``report`` counts the confirmed ones; ``failures`` has reasons by message id.

    Sending the same messages again is safe: their ids stay the same, so a duplicate can be recognised.

    :param refusing: destinations that take no messages at present, such as full queues; another try may help. What is
        not confirmed in time may still arrive.
    """

    def __init__(
        self,
        conn_id: str,
        report: SendReport,
        failures: Sequence[tuple[str, str]],
        refusing: Collection[str] = (),
    ) -> None:
        reasons = some(_by_reason(failures))
        super().__init__(
            f"connection {conn_id!r} confirmed {report.sent:,} messages and not {len(failures):,}: {reasons}."
            " Those not named may be sent again with the same ids by a retry"
        )
        self.report = report
        self.failures = tuple(failures)
        self.refusing = frozenset(refusing)


def _by_reason(failures: Sequence[tuple[str, str]]) -> list[str]:
    """Return each reason once, after the first ids that it holds for."""
    ids: dict[str, list[str]] = {}
    for message_id, reason in failures:
        ids.setdefault(reason, []).append(message_id)
    return [
        f"message{'s' if len(named) > 1 else ''} {some(named, separator=', ')}: {reason}"
        for reason, named in ids.items()
    ]


def explained(error: Exception) -> str:
    """Return the text of an error of this package; of any other error only the type, for its text may show secrets."""
    return str(error) if isinstance(error, DelayedError) else type(error).__name__


def about(conn_id: str, error: Exception) -> str:
    """Return the text of an error as :func:`explained` does, with the connection's name once before it."""
    text, prefix = explained(error), f"connection {conn_id!r}"
    return text if text.startswith(prefix) else f"{prefix}: {text}"
