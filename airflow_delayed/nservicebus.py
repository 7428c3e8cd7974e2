"""What NServiceBus endpoints read in the headers of a message: a due time, and the form of a time.

Source: NServiceBus 10, Headers.cs and DateTimeOffsetHelper.cs.
"""

from __future__ import annotations

from datetime import datetime

from airflow_delayed.message import UTC, DelayedMessage

#: When a delayed message is due, not rounded to the transport's unit. An endpoint's ``critical_time`` counts from here
#: (IncomingPipelineMetrics.cs), without it from the time the message was sent.
DELIVER_AT = "NServiceBus.DeliverAt"


def nservicebus_time(moment: datetime) -> str:
    """Write a time as NServiceBus does: ``2025-11-28 00:05:18:653833 Z``.

    :param moment: in UTC.
    """
    text = moment.isoformat(" ", "microseconds")
    return f"{text[:19]}:{text[20:26]} Z"


def parse_nservicebus_time(text: object) -> datetime | None:
    """Read what :func:`nservicebus_time` writes; None if it is something else."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S:%f Z").replace(tzinfo=UTC)
    except ValueError:
        return None


#: The type of a message, by which an endpoint reads its body and chooses a handler.
ENCLOSED_TYPES = "NServiceBus.EnclosedMessageTypes"


def headers(
    message_type: str,
    reply_to: str | None = None,
    content_type: str = "application/json",
    conversation_id: str | None = None,
) -> dict[str, str]:
    """Return the headers that an NServiceBus endpoint needs to handle a message.

    Two calls with the same arguments are equal, and so are the ids that are made of rows with these headers.

    :param message_type: the full name of the .NET type, with its namespace; its assembly may follow:
        ``Acme.Reminder, Acme.Messages``.
    :param reply_to: the queue that an endpoint's answer goes to.
    :param content_type: of the body; an endpoint chooses its serializer by it.
    :param conversation_id: what the endpoint's tools show this message and all that follow from it under; without it
        the endpoint makes one.
    :raises ValueError: the type is empty.
    """
    if not message_type.strip():
        raise ValueError("message_type is empty; give the full name of the .NET type, such as 'Acme.Reminder'")
    made = {ENCLOSED_TYPES: message_type, "NServiceBus.ContentType": content_type}
    if reply_to is not None:
        made["NServiceBus.ReplyToAddress"] = reply_to
    if conversation_id is not None:
        made["NServiceBus.ConversationId"] = conversation_id
    return made


def warning_without_type(message: DelayedMessage) -> str | None:
    """Return a warning for the log if an NServiceBus endpoint could not handle a message."""
    if ENCLOSED_TYPES in message.headers:
        return None
    return (
        f"message {message.message_id} to {message.destination} has no header {ENCLOSED_TYPES}: an NServiceBus endpoint"
        " would move it to its error queue with MessageDeserializationException; pass"
        " headers=airflow_delayed.nservicebus.headers('the .NET type'), and look for others like it"
    )
