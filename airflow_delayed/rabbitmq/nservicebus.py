"""What NServiceBus.RabbitMQ makes of a message's headers (BasicPropertiesExtensions.cs). No network."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from airflow_delayed.message import UTC

#: Header with the delay in seconds, an int32. With the time it was sent it tells NServiceBus's tools
#: ``delays migrate`` and ``delays transfer`` when a message is due; they set one aside that lacks either.
DELAY = "NServiceBus.Transport.RabbitMQ.DelayInSeconds"
TIME_SENT = "NServiceBus.TimeSent"
#: When a delayed retry was scheduled (DelayedRetry.cs); the time it was sent stays that of the first try.
RETRIED = "NServiceBus.Retries.Timestamp"
#: How long a message may wait to be received, as a .NET TimeSpan. NServiceBus makes the AMQP expiration of the
#: dispatch property of that name, never of the header, and refuses it for a delayed message; so on a message that is
#: due the header here goes along as any other.
TIME_TO_BE_RECEIVED = "NServiceBus.TimeToBeReceived"
#: A message with this header, whatever its value, may be lost when the broker restarts; the header itself is not sent.
NON_PERSISTENT = "NServiceBus.Transport.RabbitMQ.UseNonPersistentDelivery"

_PROPERTIES = {
    "content_type": "NServiceBus.ContentType",
    "correlation_id": "NServiceBus.CorrelationId",
    "reply_to": "NServiceBus.ReplyToAddress",
    "type": "NServiceBus.EnclosedMessageTypes",
}


def amqp_properties(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the AMQP properties that headers become, such as ``content_type``; the headers stay too.

    The type is the first of the enclosed types: all up to the first comma.
    """
    found = {name: headers[header] for name, header in _PROPERTIES.items() if header in headers}
    if "type" in found:
        found["type"] = found["type"].partition(",")[0]
    return found


def wire_time(moment: datetime) -> str:
    """Write a time as NServiceBus does: ``2025-11-28 00:05:18:653833 Z``.

    :param moment: in UTC.
    """
    text = moment.isoformat(" ", "microseconds")
    return f"{text[:19]}:{text[20:26]} Z"


def parse_time(text: object) -> datetime | None:
    """Read what :func:`wire_time` writes; None if it is something else."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S:%f Z").replace(tzinfo=UTC)
    except ValueError:
        return None
