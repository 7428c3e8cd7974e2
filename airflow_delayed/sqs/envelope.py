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
from typing import Any

from airflow_delayed.errors import InvalidMessage, short
from airflow_delayed.message import check_text

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
    """Return what an envelope holds, or None if the text is not one.

    :raises InvalidMessage: it is one, and its body or headers are no text.
    """
    try:
        found = _parsed(text)
    except RecursionError:
        return None
    if found is None:
        return None
    key = found.get("S3BodyKey")
    if not isinstance(key, str) or not key:
        key = None
    else:
        check_text("S3BodyKey", key)
    return Unwrapped(_body(found.get("Body")), text_headers(found["Headers"]), key)


def looks_wrapped(text: str) -> bool:
    """Return whether a reader may take a text for an envelope, though perhaps one that it cannot read."""
    try:
        return _parsed(text) is not None
    except RecursionError:
        # another reader may go deeper
        return True


def text_headers(found: object) -> dict[str, str]:
    """Return headers that were read from JSON as text by text; a null is left out, as NServiceBus does.

    :raises InvalidMessage: they are no JSON object, or a value is none that has one text.
    """
    if not isinstance(found, dict):
        raise InvalidMessage("headers", f"must be a JSON object, not {type(found).__name__}")
    headers = {}
    for name, value in found.items():
        if isinstance(value, dict | list):
            raise InvalidMessage("headers", f"the value of {short(name)} must be text, not {type(value).__name__}")
        if value is not None:
            headers[name] = str(value)
            check_text("headers", name)
            check_text("headers", headers[name])
    return headers


def _parsed(text: str) -> dict[str, Any] | None:
    # most that are none need not be parsed to know it
    if '"Headers"' not in text or not text.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    headers = found.get("Headers")
    if not isinstance(headers, dict) or not (MESSAGE_ID in headers or _TYPES in headers or _CONTROL in headers):
        return None
    return dict(found)


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
        check_text("body", text)
        return text.encode()
