"""A queue that exists for one message, so that somebody can watch it arrive."""

from __future__ import annotations

from abc import ABC, abstractmethod


class TemporaryQueue(ABC):
    """A destination that is removed when its block ends.

    :param name: the destination.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        #: Whether a message to it is on its way through the transport. A transport that would have no place for it
        #: without the queue then leaves the queue there.
        self.awaited = False
        #: What becomes of a queue that is there after the block; None: it is removed.
        self.remains: str | None = None

    @abstractmethod
    def arrives(self, seconds: float) -> bool:
        """Wait at most so many seconds for a message, take it, and return whether one has come.

        :raises TransportUnavailable: the connection failed.
        """
