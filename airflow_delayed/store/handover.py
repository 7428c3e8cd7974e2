"""Giving one batch to its transport, and telling which messages it confirmed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from airflow_delayed.delivery import DelayedDelivery
from airflow_delayed.errors import DestinationMissing, InputError, SendFailed, TransportUnavailable
from airflow_delayed.message import DelayedMessage


@dataclass(slots=True)
class Handover:
    """What became of a batch: each message is confirmed, or has a reason in ``failures``, or was not tried."""

    confirmed: list[DelayedMessage] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    #: Destinations that cannot receive anything.
    closed: set[str] = field(default_factory=set)
    #: The connection was lost: messages that are neither confirmed nor failed may have been sent, or not.
    lost: TransportUnavailable | None = None

    def fail(self, messages: Sequence[DelayedMessage], reason: str) -> None:
        """Note the same reason for some messages."""
        self.failures.update((message.message_id, reason) for message in messages)

    def merge(self, other: Handover) -> None:
        """Add what became of other messages."""
        self.confirmed += other.confirmed
        self.failures.update(other.failures)
        self.closed |= other.closed
        self.lost = self.lost or other.lost


def hand_over(transport: DelayedDelivery, messages: Sequence[DelayedMessage], now: datetime) -> Handover:
    """Send a batch so that a message or a destination at fault does not hold up the others."""
    done = Handover()
    ready = []
    for message in messages:
        try:
            transport.check(message, now)
        except InputError as error:
            done.fail([message], str(error))
        else:
            ready.append(message)
    while ready and done.lost is None:
        ready = _send(done, transport, ready, now)
    return done


def _send(
    done: Handover, transport: DelayedDelivery, messages: Sequence[DelayedMessage], now: datetime
) -> list[DelayedMessage]:
    """Send once, note what became of which message, and return those that are still to be sent."""
    taken: list[DelayedMessage] = []
    try:
        transport.send(_noted(messages, taken))
    except DestinationMissing as error:
        # nothing was sent; the others can go without those
        stuck = [message for message in messages if message.destination in error.destinations] or messages
        return _close(done, {message.destination for message in stuck}, messages, str(error))
    except SendFailed as error:
        return _part(done, messages, taken, error)
    except TransportUnavailable as error:
        done.lost = error
    except InputError as error:
        # nothing was sent, and it does not say which message is at fault
        if len(messages) == 1:
            done.fail(messages, str(error))
        for message in messages if len(messages) > 1 else ():
            if done.lost is None:
                done.merge(hand_over(transport, [message], now))
    else:
        done.confirmed += messages
    return []


def _noted(messages: Sequence[DelayedMessage], taken: list[DelayedMessage]) -> Iterator[DelayedMessage]:
    for message in messages:
        taken.append(message)
        yield message


def _part(
    done: Handover, messages: Sequence[DelayedMessage], taken: Sequence[DelayedMessage], error: SendFailed
) -> list[DelayedMessage]:
    """Tell apart the confirmed, the failed and those that the transport has not even looked at."""
    named = dict(error.failures)
    if isinstance(error.__cause__, TransportUnavailable):
        done.lost = error.__cause__
    else:
        done.failures.update(
            (message.message_id, named[message.message_id]) for message in taken if message.message_id in named
        )
    others = [message for message in taken if message.message_id not in named]
    if error.report.sent + error.report.duplicates == len(others):
        done.confirmed += others
    elif done.lost is None:
        # to keep one that arrived means a duplicate, which can be recognised; to remove one that did not is a loss
        done.fail(others, "its transport did not tell whether it was confirmed")
    rest = messages[len(taken) :]
    if not taken:
        done.fail(rest, str(error))
        return []
    if isinstance(error.__cause__, DestinationMissing):
        return _close(done, set(error.__cause__.destinations), rest, str(error.__cause__))
    return list(rest)


def _close(
    done: Handover, destinations: set[str], messages: Sequence[DelayedMessage], reason: str
) -> list[DelayedMessage]:
    """Note destinations that cannot receive, fail their messages, and return the others."""
    done.closed |= destinations
    done.fail([message for message in messages if message.destination in destinations], reason)
    return [message for message in messages if message.destination not in destinations]
