"""What a test finds: messages, and where they are."""

from __future__ import annotations

from dataclasses import dataclass, fields

from airflow_delayed.message import DelayedMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(DelayedMessage):
    """A message that was handed to a transport, which delivers it when it is due."""

    #: The connection that it was sent by.
    conn_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(DelayedMessage):
    """A message that waits in a store."""

    #: The store.
    store_conn_id: str
    #: The connection that delivers it in the end; the store's own for a queue table.
    conn_id: str


def fields_of(message: DelayedMessage) -> dict[str, object]:
    """Return a message's fields, without what else is known of it."""
    return {field.name: getattr(message, field.name) for field in fields(DelayedMessage)}
