"""Writing a message's AMQP properties, in the style of its topology."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pika import BasicProperties

from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq import nservicebus
from airflow_delayed.rabbitmq.properties import BROKERS_OWN, BYTES, CONTENT_TYPE, DESTINATION, DUE_AT
from airflow_delayed.rabbitmq.topology import Headers


class Writer:
    """Writes properties: the message's id and headers without those of an earlier way through a broker, and ours.

    :param style: ``plain``, or ``nservicebus`` for what NServiceBus.RabbitMQ's endpoints and tools read.
    """

    def __init__(self, style: Headers) -> None:
        self._style = style

    def properties(
        self, message: DelayedMessage, now: datetime, delay_seconds: int, level: str | None = None
    ) -> BasicProperties:
        """Return a message's AMQP properties.

        :param now: when it is sent, in UTC.
        :param delay_seconds: what remains from then.
        :param level: the queue of a level that it enters directly. RabbitMQ takes the header ``BCC``, an array, for
            further routing keys, removes it, and goes on to route by all of them; none matches a binding of the levels
            but the delay's own.
        """
        headers: dict[str, Any] = {name: value for name, value in message.headers.items() if name not in BROKERS_OWN}
        headers[DUE_AT] = message.due_at.isoformat(timespec="microseconds")
        headers[DESTINATION] = message.destination
        if level:
            headers["BCC"] = [level]
        content_type = message.headers.get(CONTENT_TYPE, BYTES)
        if self._style == "nservicebus":
            return _nservicebus(message, headers, content_type, now, delay_seconds)
        return BasicProperties(
            message_id=message.message_id,
            delivery_mode=2,
            timestamp=int(now.timestamp()),
            content_type=content_type,
            headers=headers,
        )


def _nservicebus(
    message: DelayedMessage, headers: dict[str, Any], content_type: str, now: datetime, delay_seconds: int
) -> BasicProperties:
    # The time sent of a delayed message is that of this publish, even if its headers have another: NServiceBus's tools
    # add the delay to it, and a message that is passed on would else come early.
    persistent = headers.pop(nservicebus.NON_PERSISTENT, None) is None
    headers.pop(nservicebus.DELAY, None)
    if delay_seconds > 0:
        # pika writes a whole number that fits as int32
        headers[nservicebus.DELAY] = delay_seconds
        headers[nservicebus.TIME_SENT] = nservicebus.wire_time(now)
    else:
        headers.setdefault(nservicebus.TIME_SENT, nservicebus.wire_time(now))
    given: dict[str, Any] = {"content_type": content_type, **nservicebus.amqp_properties(message.headers)}
    return BasicProperties(
        message_id=message.message_id, delivery_mode=2 if persistent else 1, headers=headers, **given
    )
