"""Giving one batch to its transport, and telling which messages it confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from airflow_delayed.delivery import DelayedDelivery
from airflow_delayed.errors import DestinationMissing, InputError, SendFailed
from airflow_delayed.message import DelayedMessage


@dataclass(slots=True)
class Handover:
    """What became of a batch: each message is either confirmed or has a reason in ``failures``."""

    confirmed: list[DelayedMessage] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    #: Destinations that cannot receive anything.
    closed: set[str] = field(default_factory=set)

    def fail(self, messages: Sequence[DelayedMessage], reason: str) -> None:
        """Note the same reason for some messages."""
        self.failures.update((message.message_id, reason) for message in messages)


def hand_over(transport: DelayedDelivery, messages: Sequence[DelayedMessage], now: datetime) -> Handover:
    """Send a batch so that a message or a destination at fault does not hold up the others.

    :raises TransportUnavailable: the connection was lost; some may have been confirmed before.
    """
    done = Handover()
    ready = []
    for message in messages:
        try:
            transport.check(message, now)
        except InputError as error:
            done.fail([message], str(error))
        else:
            ready.append(message)
    while ready:
        try:
            transport.send(ready)
        except DestinationMissing as error:
            # nothing was sent; the others can go without those
            stuck = [message for message in ready if message.destination in error.destinations] or ready
            done.fail(stuck, str(error))
            done.closed.update(message.destination for message in stuck)
            ready = [message for message in ready if message.destination not in done.closed]
        except SendFailed as error:
            _part(done, ready, error)
            ready = []
        except InputError as error:
            if len(ready) == 1:
                done.fail(ready, str(error))
            else:
                _one_by_one(done, transport, ready, now)
            ready = []
        else:
            done.confirmed += ready
            ready = []
    return done


def _part(done: Handover, messages: Sequence[DelayedMessage], error: SendFailed) -> None:
    named = dict(error.failures)
    rest = []
    for message in messages:
        if (reason := named.get(message.message_id)) is None:
            rest.append(message)
        else:
            done.fail([message], reason)
    if error.report.sent + error.report.duplicates == len(rest):
        done.confirmed += rest
    else:
        # to keep one that arrived means a duplicate, which can be recognised; to remove one that did not is a loss
        done.fail(rest, "the transport did not tell whether it was confirmed")


def _one_by_one(done: Handover, transport: DelayedDelivery, messages: Sequence[DelayedMessage], now: datetime) -> None:
    """Send each alone: the transport refused the batch without saying which message is at fault."""
    for message in messages:
        if message.destination in done.closed:
            done.fail([message], f"destination {message.destination!r} cannot receive")
            continue
        one = hand_over(transport, [message], now)
        done.confirmed += one.confirmed
        done.failures.update(one.failures)
        done.closed |= one.closed
