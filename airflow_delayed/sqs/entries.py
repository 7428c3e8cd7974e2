"""A message as SQS carries it: its body as text, its headers as attributes, and both read back.

Body: the text itself if its bytes are UTF-8 of characters that SQS carries (those of XML 1.0), else base64 with the
attribute ``AirflowDelayed.BodyEncoding`` = ``base64``. Id: always the attribute ``NServiceBus.MessageId``. Headers: up
to 6 as attributes of their own names; more as one JSON object in the attribute ``NServiceBus.AmazonSQS.Headers``, which
is NServiceBus's form for bodies without an envelope (MessageDispatcher.cs, DoNotWrapOutgoingMessages). A message has
10 attributes at most; 4 are kept for those above, the delay and the due time. All are of the data type String.

What goes through a delay queue has its due time in ``AirflowDelayed.DueAt``, in UTC with microseconds, as in
``2026-01-31T08:30:00.000000Z``; it keeps that when it is delivered. NServiceBus carries it along untouched.

Two other forms are for NServiceBus endpoints: ``nservicebus``, its envelope around body and headers, and
``nservicebus-unwrapped``, the body as it is and all headers in ``NServiceBus.AmazonSQS.Headers``. The envelope is one
JSON text, ``{"Body":"e30=","S3BodyKey":null,"Headers":{"NServiceBus.MessageId":"..."}}``, with the body in base64
(TransportMessage.cs, ReducedPayloadSerializerConverter.cs); it is read as InputQueuePump.cs does it
(ExtractTransportMessage).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_delayed.errors import InvalidMessage, LimitExceeded, short
from airflow_delayed.message import DelayedMessage, check_text, parse_moment, traced_headers
from airflow_delayed.nservicebus import DELIVER_AT, nservicebus_time
from airflow_delayed.sqs.queues import FIFO

if TYPE_CHECKING:
    from mypy_boto3_sqs.type_defs import (
        MessageAttributeValueTypeDef,
        MessageTypeDef,
        SendMessageBatchRequestEntryTypeDef,
    )

    Attributes: TypeAlias = dict[str, MessageAttributeValueTypeDef]
    Entry: TypeAlias = SendMessageBatchRequestEntryTypeDef

MESSAGE_ID = "NServiceBus.MessageId"
DELAY_SECONDS = "NServiceBus.AmazonSQS.DelaySeconds"
HEADERS = "NServiceBus.AmazonSQS.Headers"
BODY_ENCODING = "AirflowDelayed.BodyEncoding"
DUE_AT = "AirflowDelayed.DueAt"
#: Of a message in NServiceBus's native form, whose body is not an envelope whatever it looks like.
_NATIVE_TYPE = "MessageTypeFullName"
#: Headers by which NServiceBus's envelope is recognised, and what it has in place of an empty body.
_TYPES = "NServiceBus.EnclosedMessageTypes"
_CONTROL = "NServiceBus.ControlMessage"
_EMPTY = "empty message"
#: The attribute with the key of a body in S3, and its name in the envelope.
_S3_BODY_KEY = "S3BodyKey"
#: The forms a body can have.
RAW, NSERVICEBUS, UNWRAPPED = FORMS = ("raw", "nservicebus", "nservicebus-unwrapped")
#: Attributes that are the transport's own; a header may not begin like one.
OWN = (MESSAGE_ID, "NServiceBus.AmazonSQS.", "AirflowDelayed.")

MAX_ATTRIBUTES = 10
#: How many headers travel as attributes; whatever the delay, so that a consumer sees one form.
MAX_HEADER_ATTRIBUTES = MAX_ATTRIBUTES - 4
#: Bytes, in UTF-8: the limit of one message and of one batch.
MAX_BYTES = 1_048_576
MAX_ENTRIES = 10
#: Bytes kept for the attributes that hold the delay and the due time.
_RESERVED = 256

_REFUSED = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NAME = re.compile(r"(?!aws\.|amazon\.)(?!\.)(?!.*\.\.)[a-z0-9_.-]{1,256}(?<!\.)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message in the form in which SQS carries it. ``size`` is in bytes, with room for the delay's attributes."""

    message: DelayedMessage = field(repr=False)
    body: str = field(repr=False)
    attributes: Attributes = field(repr=False)
    size: int


@dataclass(frozen=True, slots=True)
class DecodedMessage:
    """A received message: body and headers as they were sent, and the id that is the same in every duplicate."""

    body: bytes = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    message_id: str
    #: When it was due, if it came through a delay queue: lateness, and which of two duplicates is which.
    due_at: datetime | None = None
    #: Where in the NServiceBus endpoint's S3 bucket the body is, which is empty here then.
    s3_body_key: str | None = None


def string(value: str) -> MessageAttributeValueTypeDef:
    """Return an attribute's value as SQS wants it."""
    return {"DataType": "String", "StringValue": value}


def due_text(due_at: datetime) -> str:
    """Return a due time in UTC as the attribute ``AirflowDelayed.DueAt`` has it; read back by :func:`due_of`."""
    return due_at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def due_of(attributes: Mapping[str, Any]) -> datetime | None:
    """Return the due time in a message's attributes, or None if they have no readable one."""
    try:
        return parse_moment(DUE_AT, attributes[DUE_AT]["StringValue"])
    except (KeyError, InvalidMessage):
        return None


def pack(message: DelayedMessage, form: str = RAW) -> Parcel:
    """Return a message in the form in which SQS carries it.

    The attributes that every message has are set here. Those of the delay are added by :func:`through_fifo`; the reason
    and the queue of a message in the error queue by ``_reject`` in :mod:`airflow_delayed.sqs.delay_queue`. One more
    for each message takes a place from the headers (:data:`MAX_HEADER_ATTRIBUTES`). Its name begins with one of
    :data:`OWN`: then no header can have that name, and :func:`decode` does not return it as a header.

    The headers of its trace are left out where they would change the form or pass a limit.

    :param form: "raw", "nservicebus" or "nservicebus-unwrapped".
    :raises LimitExceeded: SQS would refuse it: an empty body, a header's name or value, its size, its destination.
    """
    headers = traced_headers(message, nservicebus=form != RAW)
    if headers is not message.headers and (form != RAW or len(headers) <= MAX_HEADER_ATTRIBUTES):
        try:
            return _pack(message, headers, form)
        except LimitExceeded:
            pass  # without the trace's headers it may be within the limits
    return _pack(message, message.headers, form)


def _pack(message: DelayedMessage, headers: Mapping[str, str], form: str) -> Parcel:
    if message.destination.endswith(FIFO):
        raise LimitExceeded("destination", "is a FIFO queue, whose messages cannot have delays of their own in SQS")
    if not message.body and form != NSERVICEBUS:
        raise LimitExceeded("body", "is empty, which SQS refuses; send '{}' or a blank, or use NServiceBus's envelope")
    attributes = {MESSAGE_ID: string(message.message_id)}
    body: str | None
    if form == NSERVICEBUS:
        _check_own(headers)
        body = wrap(message.body, _with_due(headers, message), message.message_id)
        size = len(body)
    else:
        body = _text(message.body)
        size = len(message.body)
        # NServiceBus reads base64 wherever a body can be read so, and finds other bytes in "true"
        if body is None or (form == UNWRAPPED and is_base64(body)):
            body = base64.b64encode(message.body).decode()
            size = len(body)
            attributes[BODY_ENCODING] = string("base64")
        if form == UNWRAPPED:
            _check_own(headers)
            whole = {**_with_due(headers, message), MESSAGE_ID: message.message_id}
            attributes[HEADERS] = string(json.dumps(whole, separators=(",", ":")))
        else:
            _check_headers(headers)
            # a body that looks like an envelope is none if the headers are beside it
            alone = len(headers) <= MAX_HEADER_ATTRIBUTES and not looks_wrapped(body)
            attributes.update(
                {name: string(value) for name, value in headers.items()}
                if alone
                else {HEADERS: string(json.dumps(dict(headers), ensure_ascii=False, separators=(",", ":")))}
            )
    size += attributes_size(attributes) + _RESERVED
    if size > MAX_BYTES:
        raise LimitExceeded(
            "body",
            f"makes a message of {size:,} bytes with its headers, and SQS takes {MAX_BYTES:,}; send a reference to"
            " where the content is stored",
        )
    return Parcel(message, body, attributes, size)


def _text(body: bytes) -> str | None:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return None if _REFUSED.search(text) else text


def _with_due(headers: Mapping[str, str], message: DelayedMessage) -> dict[str, str]:
    return {**headers, DELIVER_AT: nservicebus_time(message.due_at)}


def _check_own(headers: Mapping[str, str]) -> None:
    for name in headers:
        if name.startswith(OWN):
            raise LimitExceeded("headers", f"the name {short(name)} is set by the transport itself; leave it out")


def _check_headers(headers: Mapping[str, str]) -> None:
    _check_own(headers)
    for name, value in headers.items():
        if not _NAME.fullmatch(name):
            raise LimitExceeded(
                "headers",
                f"SQS refuses the name {short(name)}: it allows 256 ASCII letters, digits, '_', '-' and '.', with no"
                " '.' at the ends or twice in a row, and no 'AWS.' or 'Amazon.' in front",
            )
        # the value is not shown: a header may hold what must not be in a log
        if not value:
            raise LimitExceeded("headers", f"SQS refuses the empty value of {name!r}; leave the header out")
        if _REFUSED.search(value):
            raise LimitExceeded("headers", f"the value of {name!r} has control characters, which SQS refuses")


def attributes_size(attributes: Mapping[str, Any]) -> int:
    """Return the bytes of attributes that count towards the limits: names, data types and values."""
    size = 0
    for name, value in attributes.items():
        text = value.get("StringValue")
        content = len(text.encode()) if text is not None else len(value.get("BinaryValue", b""))
        size += len(name.encode()) + len(value["DataType"]) + content
    return size


def add_attributes(body: str, attributes: Attributes, texts: Mapping[str, str]) -> int:
    """Add the attributes that a message lacks, as far as there is room for them, and return the message's size."""
    size = len(body.encode()) + attributes_size(attributes)
    for name, text in texts.items():
        if name in attributes or len(attributes) >= MAX_ATTRIBUTES:
            continue
        more = attributes_size({name: (value := string(text))})
        if size + more <= MAX_BYTES:
            attributes[name] = value
            size += more
    return size


def own_id(message: MessageTypeDef) -> dict[str, str]:
    """Return the attribute with the id of a message that was sent without one: SQS's, so that duplicates have one."""
    # as NServiceBus does
    return {MESSAGE_ID: message["MessageId"]}


def direct(body: str, attributes: Attributes, delay_seconds: int) -> Entry:
    """Return an entry for a destination, which SQS itself delays by 0 to 900 s."""
    # 0 is sent too: without it the queue's own delay would count
    return {"Id": "", "MessageBody": body, "MessageAttributes": attributes, "DelaySeconds": delay_seconds}


def through_fifo(
    body: str, attributes: Attributes, delay_seconds: int, dedup_id: str, due_at: datetime | None = None
) -> Entry:
    """Return an entry for a delay queue; the queue's own delay of 900 s counts, a message of a FIFO has none."""
    added = {DELAY_SECONDS: string(str(delay_seconds))}
    if due_at is not None:
        added[DUE_AT] = string(due_text(due_at))
    return {
        "Id": "",
        "MessageBody": body,
        "MessageAttributes": {**attributes, **added},
        "MessageDeduplicationId": dedup_id,
        # a group of its own, so that no message waits for another
        "MessageGroupId": dedup_id,
    }


def decode(received: MessageTypeDef) -> DecodedMessage:
    """Read a message that boto3 received with ``MessageAttributeNames=["All"]``, in any of the forms.

    A body is taken for base64 only where an attribute or an envelope says so: unlike NServiceBus, which reads a body
    such as ``true`` or ``1234`` so as well. NServiceBus does not mark a binary body without an envelope; it comes as
    the text that it travelled as. Its ``empty message`` is an empty body where the headers are its own: in their JSON
    they have the id, which this package's do not have there.

    :raises InvalidMessage: it cannot be read: headers that are no JSON object of texts, base64 that is none, half of a
        surrogate pair. It stays what it is however often it is received: move it to a queue of its own, or delete it.
    """
    attributes = received.get("MessageAttributes") or {}
    text = {name: value["StringValue"] for name, value in attributes.items() if "StringValue" in value}
    body = received.get("Body", "")
    headers = text_headers({name: value for name, value in text.items() if not name.startswith(OWN)})
    content, key = None, None
    if HEADERS in text:
        headers = text_headers(_json(text[HEADERS]))
        if MESSAGE_ID in headers:
            key = _s3_body_key(text.get(_S3_BODY_KEY))
            content = b"" if key or body == _EMPTY else None
    elif _NATIVE_TYPE not in text and BODY_ENCODING not in text and (wrapped := unwrap(body)):
        # beside an envelope it says what the envelope says
        headers = {name: value for name, value in headers.items() if name != _S3_BODY_KEY} | wrapped.headers
        content, key = wrapped.body, wrapped.s3_body_key
    if content is None:
        content = _bytes(body, in_base64=text.get(BODY_ENCODING) == "base64")
    inside = headers.pop(MESSAGE_ID, "")
    message_id = text.get(MESSAGE_ID) or inside or received.get("MessageId", "")
    check_text("message_id", message_id)
    return DecodedMessage(
        body=content, headers=headers, message_id=message_id, due_at=due_of(attributes), s3_body_key=key
    )


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidMessage("headers", f"the attribute {HEADERS} cannot be read as JSON") from None


def _bytes(body: str, *, in_base64: bool) -> bytes:
    if not in_base64:
        check_text("body", body)
        return body.encode()
    try:
        return base64.b64decode(body)
    except ValueError:
        raise InvalidMessage("body", f"is not base64, which its attribute {BODY_ENCODING} says it is") from None


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """The content of an envelope. ``s3_body_key``: where in the endpoint's bucket the body is, if it was too large."""

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
    """Return the content of an envelope, or None if the text is none.

    :raises InvalidMessage: it is one, and its body or headers are no text.
    """
    try:
        found = _parsed(text)
    except RecursionError:
        return None
    if found is None:
        return None
    key = _s3_body_key(found.get(_S3_BODY_KEY))
    return Unwrapped(_body(found.get("Body")), text_headers(found["Headers"]), key)


def _s3_body_key(found: object) -> str | None:
    if not isinstance(found, str) or not found:
        return None
    check_text(_S3_BODY_KEY, found)
    return found


def looks_wrapped(text: str) -> bool:
    """Return whether a text looks like an envelope to some reader, even if none could read it."""
    try:
        return _parsed(text) is not None
    except RecursionError:
        # another reader may go deeper
        return True


def text_headers(found: object) -> dict[str, str]:
    """Return headers that were read from JSON as text by text; a null is left out, as NServiceBus does.

    :raises InvalidMessage: they are no JSON object, or a value has no single text.
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
