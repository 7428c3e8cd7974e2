"""Giving one batch to its transport, and telling which messages it confirmed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple, Protocol

from airflow_delayed.delivery import Delivery
from airflow_delayed.errors import DelayedError, DestinationMissing, InputError, SendFailed, TransportUnavailable
from airflow_delayed.message import DelayedMessage

#: How many messages are made at a time.
PORTION = 250


class Failure(NamedTuple):
    """Why a message could not be handed over; ``final`` if trying again cannot mend it."""

    reason: str
    final: bool = False


class Gate(Protocol):
    """Says, before each message, whether it may still be sent."""

    def hold(self, due_at: datetime) -> None:
        """Wait until the time of a message has come, or sending may not go on."""
        ...

    def may_send(self) -> bool:
        """Return whether sending may go on; nothing more is taken after a no."""
        ...

    def now(self) -> datetime:
        """Return the time by which messages expire."""
        ...


@dataclass(slots=True)
class Handover:
    """What became of a batch: each message is confirmed, or failed, or has expired, or was not tried."""

    #: By id: a message that was sent is kept no longer, for thousands would keep Python's garbage collector at work.
    confirmed: list[str] = field(default_factory=list)
    failures: dict[str, Failure] = field(default_factory=dict)
    #: Ids of those that expired before they could be sent.
    expired: list[str] = field(default_factory=list)
    #: Destinations that cannot receive anything, and why.
    closed: dict[str, str] = field(default_factory=dict)
    #: A send came to its end, and the transport had taken something to ask its broker about.
    answered: bool = False
    #: The connection failed: messages that are neither confirmed nor failed may have been sent, or not.
    lost: Exception | None = None
    #: The gate was shut: the rest was not tried.
    stopped: bool = False

    def fail(self, messages: Collection[DelayedMessage], reason: str, *, final: bool = False) -> None:
        """Note the same reason for some messages."""
        self.failures.update((message.message_id, Failure(reason, final)) for message in messages)

    def merge(self, other: Handover) -> None:
        """Add what became of other messages."""
        self.confirmed += other.confirmed
        self.failures.update(other.failures)
        self.expired += other.expired
        self.closed.update(other.closed)
        self.answered |= other.answered
        self.lost = self.lost or other.lost
        self.stopped |= other.stopped


def explained(error: Exception) -> str:
    """Return what may be told of an error: the texts of others may show what must not be in a log."""
    return str(error) if isinstance(error, DelayedError) else type(error).__name__


def hand_over(
    transport: Delivery, messages: Sequence[DelayedMessage], now: datetime, gate: Gate | None = None
) -> Handover:
    """Send a batch so that a message or a destination at fault does not hold up the others."""
    done = Handover()
    rest = messages
    while rest and done.lost is None and not done.stopped:
        if gate is not None and not gate.may_send():
            done.stopped = True
            break
        rest = _send(done, transport, rest, now, gate)
    return done


class _Feed:
    """Gives to a transport the messages that it can take, and knows which it took."""

    def __init__(
        self,
        done: Handover,
        transport: Delivery,
        messages: Sequence[DelayedMessage],
        now: datetime,
        gate: Gate | None,
    ) -> None:
        #: The ids of those that the transport took.
        self.ids: list[str] = []
        self._done = done
        self._transport = transport
        self._messages = messages
        self._now = now
        self._gate = gate
        self._next = 0

    @property
    def taken(self) -> list[DelayedMessage]:
        """What the transport took."""
        ids = set(self.ids)
        return [message for message in self._messages[: self._next] if message.message_id in ids]

    @property
    def rest(self) -> Sequence[DelayedMessage]:
        """What the transport has not even looked at."""
        return self._messages[self._next :]

    def __length_hint__(self) -> int:
        """Let a transport know that there is something to send before its time has come, so that it can connect."""
        return len(self._messages) - self._next

    def __iter__(self) -> Iterator[DelayedMessage]:
        gate, now, check, take = self._gate, self._now, self._transport.check, self.ids.append
        for message in _in_portions(self._messages):
            if gate is not None:
                gate.hold(message.due_at)
                if not gate.may_send():
                    # ended, and no error: what the transport has taken it brings to an end, and tells
                    self._done.stopped = True
                    return
                if message.expires_at is not None and message.expires_at <= gate.now():
                    self._next += 1
                    self._done.expired.append(message.message_id)
                    continue
            self._next += 1
            try:
                check(message, now)
            except InputError as error:
                self._done.fail([message], str(error), final=True)
                continue
            take(message.message_id)
            yield message


def _in_portions(messages: Sequence[DelayedMessage]) -> Iterator[DelayedMessage]:
    """Yield messages that may be made only when they are asked for, some at a time."""
    for start in range(0, len(messages), PORTION):
        yield from messages[start : start + PORTION]


def _send(
    done: Handover,
    transport: Delivery,
    messages: Sequence[DelayedMessage],
    now: datetime,
    gate: Gate | None,
) -> Sequence[DelayedMessage]:
    """Send once, note what became of which message, and return those that are still to be sent."""
    feed = _Feed(done, transport, messages, now, gate)
    try:
        transport.send(feed)
    except DestinationMissing as error:
        # nothing was sent; the others can go without those
        done.answered |= bool(feed.ids)
        others = [*feed.taken, *feed.rest]
        stuck = [message for message in others if message.destination in error.destinations] or others
        return _close(done, {message.destination for message in stuck}, others, str(error))
    except SendFailed as error:
        return _part(done, feed, error)
    except InputError as error:
        # nothing was sent, and it does not say which message is at fault
        others = [*feed.taken, *feed.rest]
        if len(others) == 1:
            done.fail(others, str(error), final=True)
        for message in others if len(others) > 1 else ():
            if done.lost is None and not done.stopped:
                done.merge(hand_over(transport, [message], now, gate))
    except Exception as error:
        # the connection's, or a defect of the transport: what it sent is not known
        done.lost = error
    else:
        done.answered |= bool(feed.ids)
        done.confirmed += feed.ids
    return []


def _part(done: Handover, feed: _Feed, error: SendFailed) -> Sequence[DelayedMessage]:
    """Tell apart the confirmed, the failed and those that the transport has not even looked at."""
    named = dict(error.failures)
    cause = error.__cause__
    missing = set(cause.destinations) if isinstance(cause, DestinationMissing) else set()
    if isinstance(cause, TransportUnavailable):
        done.lost = cause
    else:
        done.answered |= bool(feed.ids)
        for message in feed.taken:
            if message.message_id in named:
                final = message.destination in missing
                done.failures[message.message_id] = Failure(named[message.message_id], final)
    others = [message for message in feed.taken if message.message_id not in named]
    if error.report.sent + error.report.duplicates == len(others):
        done.confirmed += [message.message_id for message in others]
    elif done.lost is None:
        # to keep one that arrived means a duplicate, which can be recognised; to remove one that did not is a loss
        done.fail(others, "its transport did not tell whether it was confirmed")
    rest = feed.rest
    if not feed.ids:
        done.fail(rest, str(error))
        return []
    if missing:
        return _close(done, missing, rest, str(cause))
    return rest


def _close(
    done: Handover, destinations: Collection[str], messages: Sequence[DelayedMessage], reason: str
) -> list[DelayedMessage]:
    """Note destinations that cannot receive, fail their messages, and return the others."""
    done.closed.update(dict.fromkeys(destinations, reason))
    done.fail([message for message in messages if message.destination in destinations], reason, final=True)
    return [message for message in messages if message.destination not in destinations]
