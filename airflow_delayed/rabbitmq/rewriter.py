"""Writing the AMQP properties of a message that is moved: its own, told anew where and when it is due."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq import nservicebus
from airflow_delayed.rabbitmq.properties import BROKERS_OWN, DESTINATION, DUE_AT, ORIGINAL_KEY, SET_ASIDE
from airflow_delayed.rabbitmq.topology import Headers

if TYPE_CHECKING:
    from pika import BasicProperties

    from airflow_delayed.rabbitmq.decoding import Received


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(DelayedMessage):
    """A message that was taken from a queue and is not acknowledged there.

    Unlike one that a user makes it is not checked: its id may be missing (then it is empty here and stays missing in
    the broker) and its headers, which are the original's alone, need not be text.
    """

    original: Received = field(repr=False)
    queue: str
    routing_key: str
    delivery_tag: int

    def __post_init__(self) -> None:
        """Check nothing: it has been through a broker already."""

    @property
    def returns(self) -> int:
        """How often it was taken and returned before, as quorum queues count."""
        count = (self.original.headers or {}).get(DELIVERY_COUNT, 0)
        return count if isinstance(count, int) else 0


#: Header with which a quorum queue counts how often a message was returned.
DELIVERY_COUNT = "x-delivery-count"
#: Headers of the way a message has behind it.
_PASSED = BROKERS_OWN | {DELIVERY_COUNT, ORIGINAL_KEY, *SET_ASIDE, nservicebus.DELAY, "CC", "BCC"}


class Rewriter:
    """Writes the properties of :class:`Taken` messages, all as they were but for the headers of the way.

    ``expiration`` stays on a message that is due alone, since in a delay level it would fire first; the broker itself
    removes it at the first level. ``user_id`` stays if it is the user's who moves it, since the broker refuses another.

    :param style: of the headers, as :class:`airflow_delayed.rabbitmq.writer.Writer` has it.
    :param user: who is logged in.
    """

    def __init__(self, style: Headers, user: str | None) -> None:
        self._style = style
        self._user = user

    def properties(
        self, message: DelayedMessage, now: datetime, delay_seconds: int, level: str | None = None
    ) -> BasicProperties:
        """Return the properties with which a message is published; the arguments are those of ``Writer.properties``."""
        if not isinstance(message, Taken):
            raise TypeError("only what was taken from a queue has properties to keep")
        headers: dict[str, Any] = {
            DUE_AT: message.due_at.isoformat(timespec="microseconds"),
            DESTINATION: message.destination,
        }
        if self._style == "nservicebus" and delay_seconds > 0:
            # its tools add the one to the other
            headers[nservicebus.DELAY] = delay_seconds
            headers[nservicebus.TIME_SENT] = nservicebus.wire_time(now)
        if level:
            headers["BCC"] = [level]
        return message.original.again(without=_PASSED, added=headers, user=self._user, expires=delay_seconds <= 0)
