"""One attempt to send claimed rows: decode them, deliver their messages, and decide the outcome of each row.

One :class:`DeliveryResult` collects what happens to the messages. From it :func:`decide` makes a
:class:`airflow_delayed.store.dispatch.settle.BatchOutcome` for each batch, which is then written to the store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from random import random
from types import MappingProxyType
from typing import NamedTuple, Protocol, overload

from airflow_delayed.clock import next_sleep
from airflow_delayed.delivery import Delivery
from airflow_delayed.errors import (
    DestinationMissing,
    InputError,
    InvalidMessage,
    SendFailed,
    TransportUnavailable,
)
from airflow_delayed.fields import FIELD_COLUMNS
from airflow_delayed.message import MAX_ID_LENGTH, UTC, DelayedMessage, unchecked
from airflow_delayed.store.dispatch.settle import BatchOutcome, PlannedRetry, Row, shortened
from airflow_delayed.store.records import to_message

#: The most messages that are made at a time.
PORTION = 250
#: The first and the longest pause between two attempts of one message, in seconds.
FIRST_RETRY, LONGEST_RETRY = 1.0, 300.0
#: Headers of a copy for the error destination, as NServiceBus has them: FaultsHeaderKeys.FailedQ names the queue that
#: the message was for, so that ServicePulse's retry sends it there; the time is that of DateTimeOffsetHelper
#: (``yyyy-MM-dd HH:mm:ss:ffffff Z``).
FAILED_QUEUE = "NServiceBus.FailedQ"
_REASON = "NServiceBus.ExceptionInfo.Message"
TIME_OF_FAILURE = "NServiceBus.TimeOfFailure"
#: Valid ids, each with a blank behind it.
_IDS = re.compile(f"(?:[!-~]{{1,{MAX_ID_LENGTH}}} )*")
#: Messages are made together if so many, on average, have the same destination, headers and tag.
_LEAST_ALIKE = 4
#: The columns of optional fields that none of these messages has.
_DIFFERING = [column for name, column in FIELD_COLUMNS.items() if name != "tag"]


class Failure(NamedTuple):
    """Why a message could not be sent; ``final`` if another attempt cannot help.

    :param refused: its destination takes no messages at present, so that this is no attempt of the message's own.
    """

    reason: str
    final: bool = False
    refused: bool = False


class SendGuard(Protocol):
    """Decides, before each message, whether it may still be sent."""

    def hold(self, due_at: datetime) -> None:
        """Wait until the time of a message has come, or sending may not go on."""
        ...

    def may_send(self) -> bool:
        """Return whether sending may go on; after False nothing more is sent."""
        ...

    def now(self) -> datetime:
        """Return the time by which messages expire."""
        ...


@dataclass(slots=True)
class DeliveryResult:
    """The result of an attempt: each message was confirmed, failed, expired, or was not tried."""

    #: Ids only: to keep thousands of sent messages would keep Python's garbage collector busy.
    confirmed: list[str] = field(default_factory=list)
    failures: dict[str, Failure] = field(default_factory=dict)
    #: Ids of messages that expired before they could be sent.
    expired: list[str] = field(default_factory=list)
    #: Destinations that cannot receive anything, and why.
    closed_destinations: dict[str, str] = field(default_factory=dict)
    #: Destinations that take no messages at present, and why.
    refusing: dict[str, str] = field(default_factory=dict)
    #: A send with at least one message ended without an error of the connection, so the broker answers.
    answered: bool = False
    #: The error of a connection that failed: messages neither confirmed nor failed may have been sent, or not.
    connection_error: Exception | None = None
    #: The guard stopped the attempt; the rest was not tried.
    stopped: bool = False

    @property
    def ended(self) -> bool:
        """Whether nothing more is sent in this attempt."""
        return self.stopped or self.connection_error is not None

    def fail(self, messages: Iterable[DelayedMessage], reason: str, *, final: bool = False) -> None:
        """Record the failure of messages, all for the same reason."""
        self.failures.update((message.message_id, Failure(reason, final)) for message in messages)


# -- decoding --------------------------------------------------------------------------------------------------------


def decode_rows(
    rows: Sequence[Row],
    closed: Mapping[str, str],
    now: datetime,
    result: DeliveryResult,
    refusing: Mapping[str, str] = MappingProxyType({}),
) -> Sequence[DelayedMessage]:
    """Return the messages of rows; rows that have expired, or cannot or may not be sent, are entered in the result.

    :param closed: the reason by destination, for destinations that cannot or may not receive.
    :param refusing: the same for destinations that take no messages at present.
    """
    if not closed and not refusing and (lazy := LazyMessages.of(rows)) is not None:
        return lazy
    messages = []
    for row in rows:
        if row["ExpiresAt"] is not None and row["ExpiresAt"] <= now:
            result.expired.append(row["Id"])
        elif row["Destination"] in closed:
            result.failures[row["Id"]] = Failure(closed[row["Destination"]], final=True)
        elif row["Destination"] in refusing:
            result.failures[row["Id"]] = Failure(refusing[row["Destination"]], refused=True)
        else:
            try:
                messages.append(to_message(row))
            except InvalidMessage as error:
                result.failures[row["Id"]] = Failure(str(error), final=True)
    return messages


class LazyMessages(Sequence[DelayedMessage]):
    """Messages of rows, each made only when the transport takes it; :meth:`of` has checked all rows before.

    A dispatcher sends thousands at a time. To check and make each message by itself takes as long as its claim in the
    database, and to have all of them in memory keeps Python's garbage collector busy for as long again.
    """

    def __init__(self, rows: Sequence[Row], like: Sequence[DelayedMessage]) -> None:
        self._rows = rows
        #: For each row a message with the same destination, headers and tag.
        self._like = like

    @classmethod
    def of(cls, rows: Sequence[Row]) -> LazyMessages | None:
        """Return the messages of rows; None if one of them can expire or cannot be sent, or if too few are alike."""
        kinds = [(row["Destination"], row["Headers"], row["Tag"]) for row in rows]
        distinct = dict(zip(kinds, rows, strict=True))
        if len(distinct) * _LEAST_ALIKE > len(rows):
            return None
        times = [row["Time"] for row in rows]
        if {type(time) for time in times} != {datetime} or not all(time.tzinfo is UTC for time in times):
            return None
        if any(row[column] is not None for column in _DIFFERING for row in rows):
            return None
        if not _IDS.fullmatch(" ".join([*(row["Id"] for row in rows), ""])):
            return None
        try:
            known = {kind: to_message(row) for kind, row in distinct.items()}
        except InvalidMessage:
            return None
        return cls(rows, [known[kind] for kind in kinds])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[DelayedMessage]:
        return iter(self[:])

    @overload
    def __getitem__(self, index: int) -> DelayedMessage: ...

    @overload
    def __getitem__(self, index: slice) -> list[DelayedMessage]: ...

    def __getitem__(self, index: int | slice) -> DelayedMessage | list[DelayedMessage]:
        if isinstance(index, int):
            return to_message(self._rows[index])
        rows, like = self._rows[index], self._like[index]
        return unchecked(
            len(rows),
            destination=[one.destination for one in like],
            body=[bytes(row["State"]) for row in rows],
            due_at=[row["Time"] for row in rows],
            message_id=[row["Id"] for row in rows],
            headers=[one.headers for one in like],
            tag=[one.tag for one in like],
            trace=[one.trace for one in like],
        )


# -- delivering ------------------------------------------------------------------------------------------------------


def deliver(
    transport: Delivery,
    messages: Sequence[DelayedMessage],
    now: datetime,
    guard: SendGuard | None = None,
    result: DeliveryResult | None = None,
) -> DeliveryResult:
    """Send messages so that a message or a destination at fault does not hold up the others."""
    result = DeliveryResult() if result is None else result
    rest = messages
    while rest and not result.ended:
        if guard is not None and not guard.may_send():
            result.stopped = True
            break
        rest = _send(result, transport, rest, now, guard)
    return result


class _Feed:
    """Gives a transport the messages that it can send, and records which of them it took."""

    def __init__(
        self,
        result: DeliveryResult,
        transport: Delivery,
        messages: Sequence[DelayedMessage],
        now: datetime,
        guard: SendGuard | None,
    ) -> None:
        #: The ids of the messages that the transport took.
        self.ids: list[str] = []
        self._result = result
        self._transport = transport
        self._messages = messages
        self._now = now
        self._guard = guard
        self._next = 0

    @property
    def taken(self) -> list[DelayedMessage]:
        ids = set(self.ids)
        return [message for message in self._messages[: self._next] if message.message_id in ids]

    @property
    def rest(self) -> Sequence[DelayedMessage]:
        return self._messages[self._next :]

    def __length_hint__(self) -> int:
        """Show a transport that messages will come before the first is due, so that it can connect."""
        return len(self._messages) - self._next

    def __iter__(self) -> Iterator[DelayedMessage]:
        guard, now, check, take = self._guard, self._now, self._transport.check, self.ids.append
        for message in _in_portions(self._messages):
            if guard is not None:
                guard.hold(message.due_at)
                if not guard.may_send():
                    # an end without an error, so that the transport sends and reports what it has taken
                    self._result.stopped = True
                    return
                if message.expires_at is not None and message.expires_at <= guard.now():
                    self._next += 1
                    self._result.expired.append(message.message_id)
                    continue
            self._next += 1
            try:
                check(message, now)
            except InputError as error:
                self._result.fail([message], str(error), final=True)
                continue
            take(message.message_id)
            yield message


def _in_portions(messages: Sequence[DelayedMessage]) -> Iterator[DelayedMessage]:
    for start in range(0, len(messages), PORTION):
        yield from messages[start : start + PORTION]


def _send(
    result: DeliveryResult,
    transport: Delivery,
    messages: Sequence[DelayedMessage],
    now: datetime,
    guard: SendGuard | None,
) -> Sequence[DelayedMessage]:
    feed = _Feed(result, transport, messages, now, guard)
    try:
        transport.send(feed)
    except DestinationMissing as error:
        # nothing was sent; messages to other destinations can still be sent
        result.answered |= bool(feed.ids)
        others = [*feed.taken, *feed.rest]
        stuck = [message for message in others if message.destination in error.destinations] or others
        return _close(result, {message.destination for message in stuck}, others, str(error))
    except SendFailed as error:
        return _part(result, feed, error)
    except InputError as error:
        # nothing was sent, and the error does not name the message at fault
        others = [*feed.taken, *feed.rest]
        if len(others) == 1:
            result.fail(others, str(error), final=True)
        for message in others if len(others) > 1 else ():
            if not result.ended:
                deliver(transport, [message], now, guard, result)
    except Exception as error:
        # an error of the connection, or a defect of the transport: what it sent is unknown
        result.connection_error = error
    else:
        result.answered |= bool(feed.ids)
        result.confirmed += feed.ids
    return []


def _part(result: DeliveryResult, feed: _Feed, error: SendFailed) -> Sequence[DelayedMessage]:
    named = dict(error.failures)
    cause = error.__cause__
    missing = set(cause.destinations) if isinstance(cause, DestinationMissing) else set()
    beyond_limit = cause.message_id if isinstance(cause, InvalidMessage) else None
    if isinstance(cause, TransportUnavailable):
        result.connection_error = cause
    else:
        result.answered |= bool(feed.ids)
        for message in feed.taken:
            if message.message_id in named:
                reason, to = named[message.message_id], message.destination
                refused = to in error.refusing
                final = to in missing or message.message_id == beyond_limit
                result.failures[message.message_id] = Failure(reason, final, refused)
                if refused:
                    result.refusing.setdefault(to, reason)
    others = [message for message in feed.taken if message.message_id not in named]
    if error.report.sent + error.report.duplicates == len(others):
        result.confirmed += [message.message_id for message in others]
    elif result.connection_error is None:
        # keeping a message that arrived makes a duplicate, which can be recognised; removing another would lose it
        result.fail(others, "its transport did not tell whether it was confirmed")
    rest = feed.rest
    if not feed.ids:
        result.fail(rest, str(error))
        return []
    if error.refusing:
        for message in rest:
            if (why := result.refusing.get(message.destination)) is not None:
                result.failures[message.message_id] = Failure(why, refused=True)
        rest = [message for message in rest if message.destination not in result.refusing]
    if missing:
        return _close(result, missing, rest, str(cause))
    return rest


def _close(
    result: DeliveryResult, destinations: Collection[str], messages: Sequence[DelayedMessage], reason: str
) -> list[DelayedMessage]:
    """Record destinations that cannot receive, fail their messages, and return the other messages."""
    result.closed_destinations.update(dict.fromkeys(destinations, reason))
    result.fail([message for message in messages if message.destination in destinations], reason, final=True)
    return [message for message in messages if message.destination not in destinations]


# -- deciding --------------------------------------------------------------------------------------------------------


def decide(
    batches: Iterable[Sequence[Row]],
    result: DeliveryResult,
    number_of_retries: int,
    now: datetime,
    *,
    rests: Mapping[str, datetime] = MappingProxyType({}),
    chance: Callable[[], float] = random,
) -> list[BatchOutcome]:
    """Return the outcome of each batch of an attempt; rows that are given up are in ``failed``.

    :param rests: when destinations that take no messages at present are tried again.
    """
    confirmed, expired = set(result.confirmed), set(result.expired)
    outcomes = []
    for rows in batches:
        outcome = BatchOutcome(at=now)
        for row in rows:
            name = row["Id"]
            if name in confirmed:
                outcome.delivered.append(row)
            elif name in expired:
                outcome.expired.append(row)
            elif (failure := result.failures.get(name)) is None:
                outcome.released.append(row)
            elif failure.refused:
                next_try = rests.get(row["Destination"], now)
                outcome.retry.append(PlannedRetry(row, failure.reason, next_try, counted=False))
            elif failure.final or _failures(row) >= number_of_retries:
                outcome.failed.append((row, failure.reason))
            else:
                seconds = next_sleep(_failures(row) + 1, first=FIRST_RETRY, longest=LONGEST_RETRY, chance=chance)
                outcome.retry.append(PlannedRetry(row, failure.reason, now + timedelta(seconds=seconds)))
        outcomes.append(outcome)
    return outcomes


def _failures(row: Row) -> int:
    """Return how many attempts have failed; another program may have written a negative number."""
    return max(0, int(row["RetryCount"]))


# -- giving up -------------------------------------------------------------------------------------------------------


def error_copy(message: DelayedMessage, destination: str, reason: str, now: datetime) -> DelayedMessage:
    """Return the copy for the error destination: due at once, and without an expiry."""
    headers = {
        **message.headers,
        FAILED_QUEUE: message.destination,
        _REASON: reason,
        TIME_OF_FAILURE: f"{now.astimezone(UTC):%Y-%m-%d %H:%M:%S:%f} Z",
    }
    return replace(message, destination=destination, headers=headers, due_at=min(message.due_at, now), expires_at=None)


def error_copies(outcome: BatchOutcome, error_destination: str, now: datetime) -> list[DelayedMessage]:
    """Return the copies of given-up messages for the error destination, of those rows that can be read."""
    copies = []
    for row, reason in outcome.failed:
        try:
            copies.append(error_copy(to_message(row), error_destination, shortened(reason), now))
        except InvalidMessage:
            continue  # it stays given up, and is moved to the table of failed messages
    return copies


def dead_letter(outcome: BatchOutcome, result: DeliveryResult, error_destination: str) -> int:
    """Enter the result of the error copies in the outcome; return how many the error destination refused."""
    confirmed = set(result.confirmed)
    failed: list[tuple[Row, str]] = []
    refused = 0
    for row, reason in outcome.failed:
        name = row["Id"]
        if name in confirmed:
            outcome.dead_lettered.append(row)
        elif name in result.failures:
            refused += 1
            why = result.failures[name].reason
            failed.append((row, f"{reason}; error destination {error_destination!r}: {why}"))
        elif result.ended:
            # not tried: the message fails again later, and its copy is sent then
            outcome.released.append(row)
        else:
            failed.append((row, reason))
    outcome.failed = failed
    return refused
