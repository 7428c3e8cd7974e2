"""What an event says of a message that arrived: what may stand in Airflow's database and be seen in its UI."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.message import parse_moment
from airflow_delayed.rabbitmq.decoding import text
from airflow_delayed.rabbitmq.properties import DESTINATION, DUE_AT

if TYPE_CHECKING:
    from pika import BasicProperties

#: Bytes of the longest name that a queue can have.
_LONGEST_NAME = 255


def told(
    found: BasicProperties,
    body: bytes | None,
    *,
    redelivered: bool,
    body_limit: int | None = None,
    size: int | None = None,
) -> dict[str, Any]:
    """Return what an event says of a message, which JSON can hold.

    ``message_id``, ``destination`` and ``due_at`` (ISO 8601 in UTC with microseconds) as the headers
    ``airflow-delayed-destination`` and ``airflow-delayed-due-at`` tell them, None where there is none;
    ``redelivered``: the broker had handed the message over before, so that there may be another event of it;
    ``body_bytes``: its size. No header's value beside these, for it may be a secret.

    :param body_limit: bytes; a body up to this size is in it as ``body`` if it is text in UTF-8, else encoded as
        ``body_base64``. None: no body.
    :param size: bytes of the body; needed where the body itself is not there.
    """
    headers: Mapping[str, Any] = found.headers or {}
    says: dict[str, Any] = {
        "message_id": text(found.message_id or "") or None,
        "destination": _text(headers.get(DESTINATION)),
        "due_at": _moment(headers.get(DUE_AT)),
        "redelivered": redelivered,
        "body_bytes": len(body or b"") if size is None else size,
    }
    if body is not None and body_limit is not None and len(body) <= body_limit:
        decoded = _decoded(body)
        if decoded is None:
            says["body_base64"] = base64.b64encode(body).decode()
        else:
            says["body"] = decoded
    return says


def _decoded(body: bytes) -> str | None:
    try:
        # not every database can hold a NUL in JSON
        return None if b"\0" in body else body.decode()
    except UnicodeDecodeError:
        return None


def _text(value: object) -> str | None:
    # what is longer is the name of no queue
    return text(value) if isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME else None


def _moment(value: object) -> str | None:
    try:
        return parse_moment(DUE_AT, value).isoformat(timespec="microseconds")
    except InvalidMessage:
        return None
