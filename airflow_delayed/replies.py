"""Replies: the answer to a message, and the queue in which a task waits for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

#: The ids of the message that an NServiceBus endpoint answers (Headers.cs); a reply has both.
RELATED_TO = "NServiceBus.RelatedTo"
CORRELATION_ID = "NServiceBus.CorrelationId"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer to a message.

    :param message_id: its own id; None if it has none.
    :param answers: the id of the message that it answers.
    :param body: the content, as bytes; like the headers, never shown when the reply is printed.
    :param headers: text by text; headers of other types are left out.
    """

    message_id: str | None
    answers: str
    body: bytes = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)


def answered(headers: Mapping[str, Any], correlation_id: str | None, wanted: Collection[str]) -> str | None:
    """Return which of the wanted ids a message answers, or None.

    :param headers: of the message, as another program wrote them.
    :param correlation_id: AMQP's property, of services that do not write NServiceBus's headers.
    """
    stated: Iterator[object] = iter((headers.get(RELATED_TO), headers.get(CORRELATION_ID), correlation_id))
    return next((value for value in stated if isinstance(value, str) and value in wanted), None)


class ReplyQueue(ABC):
    """A queue of replies to many tasks. Each stays until the task that waits for it has removed it.

    No method may be called while another one works. A reply is named by a key, which is text.
    """

    @abstractmethod
    def collect(self, ids: Collection[str]) -> dict[str, str]:
        """Look through the queue, and return the keys of the replies to messages with these ids, by id.

        :raises DelayedError: there is no such queue, or it cannot be read.
        """

    @abstractmethod
    def collected(self, message_id: str) -> str | None:
        """Return the key of a reply that can be read at once; check that the queue can be used.

        :raises DelayedError: as :meth:`collect`.
        """

    @abstractmethod
    def read(self, message_id: str, key: str) -> Reply | None:
        """Return a reply, which stays where it is; None if it is not there."""

    @abstractmethod
    def remove(self, message_id: str, key: str) -> None:
        """Remove a reply for good."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; it is opened again when it is needed."""
