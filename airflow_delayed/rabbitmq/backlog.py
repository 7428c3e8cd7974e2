"""What of a send is still to be done, and what became of the rest; it outlives the connections."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import DelayedError, SendFailed
from airflow_delayed.message import DelayedMessage


@dataclass(slots=True)
class Entry:
    """A message on its way, and how often the broker has refused it."""

    message: DelayedMessage
    refusals: int = 0


@dataclass(slots=True)
class Backlog:
    """The messages of one call of ``send``.

    After the first message that cannot be sent, or an error of the source, no more are taken from it; those that were
    taken are brought to an end, so that the outcome is true of each message.
    """

    conn_id: str
    source: Iterator[DelayedMessage]
    report: SendReport = field(default_factory=SendReport)
    #: Whether anything was written to a broker.
    published: bool = False
    _again: deque[Entry] = field(default_factory=deque)
    _failures: list[tuple[str, str]] = field(default_factory=list)
    _cause: BaseException | None = None
    _from_source: bool = False
    _ended: bool = False

    def take(self) -> Entry | None:
        """Return the next message to publish; None if there is none."""
        if self._again:
            return self._again.popleft()
        if self._ended:
            return None
        try:
            message = next(self.source, None)
        except Exception as error:
            self._cause, self._from_source, message = error, True, None
        if message is None:
            self._ended = True
            return None
        return Entry(message)

    def confirm(self, entry: Entry) -> None:
        """Count a message that the broker confirmed."""
        self.report.add(entry.message)

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Have messages sent again, before all others and in their order."""
        self._again.extendleft(reversed(list(entries)))

    def fail(self, entry: Entry, cause: DelayedError | str) -> None:
        """Give one message up, and take no more from the source."""
        self._ended = True
        self._failures.append((entry.message.message_id, str(cause)))
        if self._cause is None and isinstance(cause, DelayedError):
            self._cause = cause

    def give_up(self, cause: DelayedError | str) -> None:
        """Give up all messages that were taken and are not confirmed."""
        self._ended = True
        while self._again:
            self.fail(self._again.popleft(), cause)

    def outcome(self) -> SendReport:
        """Return the report if all went well.

        :raises SendFailed: messages were given up.
        :raises DelayedError: the first one's cause, if nothing at all was published.
        """
        if self._cause is not None and (self._from_source or not self.published):
            raise self._cause
        if self._failures:
            raise SendFailed(self.conn_id, self.report, self._failures) from self._cause
        return self.report
