"""NServiceBus's envelope: body and headers as one JSON text.

``{"Body":"e30=","S3BodyKey":null,"Headers":{"NServiceBus.MessageId":"..."}}``, the body in base64, an empty one as
``empty message`` (TransportMessage.cs, ReducedPayloadSerializerConverter.cs); read as InputQueuePump.cs does
(ExtractTransportMessage).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

MESSAGE_ID = "NServiceBus.MessageId"
_TYPES = "NServiceBus.EnclosedMessageTypes"
_CONTROL = "NServiceBus.ControlMessage"
_EMPTY = "empty message"


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """What an envelope held. ``s3_body_key``: where in the endpoint's bucket the body is, if it was too large."""

    body: bytes = field(repr=False)
    headers: dict[str, str] = field(repr=False)
    s3_body_key: str | None = None


def wrap(body: bytes, headers: Mapping[str, str], message_id: str) -> str:
    """Return the envelope's text: ASCII, so that SQS takes it whatever body and headers are."""
    return json.dumps(
        {
            "Body": base64.b64encode(body).decode() if body else _EMPTY,
            "S3BodyKey": None,
            "Headers": {**headers, MESSAGE_ID: message_id},
        },
        separators=(",", ":"),
    )


def unwrap(text: str) -> Unwrapped | None:
    """Return what an envelope holds, or None if the text is not one."""
    # most that are none need not be parsed to know it
    if '"Headers"' not in text or not text.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    headers = found.get("Headers")
    if not isinstance(headers, dict) or not (MESSAGE_ID in headers or _TYPES in headers or _CONTROL in headers):
        return None
    key = found.get("S3BodyKey")
    return Unwrapped(
        _body(found.get("Body")),
        {name: str(value) for name, value in headers.items() if value is not None},
        key if isinstance(key, str) and key else None,
    )


def is_base64(text: str) -> bool:
    """Return whether NServiceBus would take a text for base64, as it does with ``1234`` or ``true``."""
    try:
        base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def _body(text: object) -> bytes:
    if not isinstance(text, str) or text == _EMPTY:
        return b""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        # a sender of its own making, with text in it
        return text.encode()
