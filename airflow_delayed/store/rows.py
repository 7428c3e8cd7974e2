"""Messages as rows of the store, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from airflow_delayed.errors import InvalidMessage, LimitExceeded
from airflow_delayed.identity import digest_of
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store.drivers import NoTime
from airflow_delayed.store.schema import MAX_BODY, MAX_DESTINATION, MAX_HEADERS, MAX_QUEUE_NAME, MAX_TAG

#: ``json.dumps`` would make an encoder for each message.
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def check_limits(message: DelayedMessage) -> None:
    """Check a message against the store's columns, and against what a dispatcher reads.

    :raises LimitExceeded: the destination has over 200 characters, the tag over 250, or the body over 128 MiB.
    :raises InvalidMessage: destination or tag has a null character.
    """
    _check_text("destination", message.destination, MAX_DESTINATION)
    if message.tag is not None:
        _check_text("tag", message.tag, MAX_TAG)
    _check_size("body", message.body, MAX_BODY)


def _check_size(column: str, value: bytes, limit: int) -> None:
    if len(value) > limit:
        raise LimitExceeded(
            column,
            f"has {len(value):,} bytes, and a dispatcher reads up to {limit:,}; keep the content elsewhere and send"
            " where it is",
        )


def check_queue_name(name: str) -> None:
    """Check that a queue table can have a destination's name.

    :raises LimitExceeded: it is longer than a table's name may be.
    """
    if len(name.encode()) > MAX_QUEUE_NAME:
        raise LimitExceeded(
            "destination", f"has {len(name.encode())} bytes; the name of a table has up to {MAX_QUEUE_NAME}"
        )


def _check_text(column: str, value: str, limit: int) -> None:
    if len(value) > limit:
        raise LimitExceeded(column, f"has {len(value)} characters; the store keeps up to {limit}")
    if "\0" in value:
        raise InvalidMessage(column, "has a null character, which not every database keeps as text")


def to_row(message: DelayedMessage, deliver_conn_id: str | None, run: int | None = None) -> dict[str, Any]:
    """Return a message as the row that is stored, without StoredAt.

    :param run: the number of the task's run that it comes from.
    :raises LimitExceeded: it does not fit.
    """
    check_limits(message)
    headers = _JSON(dict(message.headers)).encode()
    _check_size("headers", headers, MAX_HEADERS)
    return {
        "Id": message.message_id,
        "Destination": message.destination,
        "State": message.body,
        "Time": message.due_at,
        "Headers": headers,
        "RetryCount": 0,
        "DeliverConnId": deliver_conn_id,
        "Tag": message.tag,
        "ExpiresAt": message.expires_at,
        "Digest": digest_of(message),
        "Run": run,
    }


def headers_of(data: bytes) -> dict[str, Any]:
    """Return the JSON object that a column of headers holds, whatever its values are.

    :raises InvalidMessage: it holds something else.
    """
    try:
        # text is read at once, while bytes are looked at first: they could be UTF-16
        headers = json.loads(data.decode())
    except (ValueError, RecursionError):
        headers = None
    if not isinstance(headers, dict):
        raise InvalidMessage("headers", "are not a JSON object in UTF-8")
    return headers


def to_message(row: Mapping[str, Any]) -> DelayedMessage:
    """Return the message of a row.

    :raises InvalidMessage: the row was not written by this package and says something that cannot be sent, or is so
        large that a claim has left out its content.
    """
    if row["State"] is None:
        raise LimitExceeded(
            "body",
            f"has {row['BodyBytes']:,} bytes and the headers {row['HeadersBytes']:,}, too many to be read; a dispatcher"
            f" reads up to {MAX_BODY:,} and {MAX_HEADERS:,}; send where the content is, in its place",
        )
    given = bytes(row["Headers"])
    headers = headers_of(given) if given != b"{}" else {}
    if isinstance(row["Time"], NoTime):
        raise InvalidMessage("due_at", "is not a time of the years 1 to 9999")
    return DelayedMessage(
        destination=row["Destination"],
        body=bytes(row["State"]),
        due_at=row["Time"],
        message_id=row["Id"],
        headers=headers,
        tag=row["Tag"],
        expires_at=row["ExpiresAt"],
    )
