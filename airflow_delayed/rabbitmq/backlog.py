"""The messages of one send: to be sent, unconfirmed, given up. It outlives the connections. No network."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import DelayedError, InvalidMessage, LimitExceeded, SendFailed, TransportUnavailable
from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq.topology import PublishAddress

#: Bytes of a body that is published beside others, though no body of its size was confirmed before.
SURE_BYTES = 1024
#: RabbitMQ's words for a body beyond its ``max_message_size``.
_TOO_LARGE = re.compile(r"message size \d+ is larger than (?:configured )?max size (\d+)")
#: How many unconfirmed messages a destination may have that has confirmed none, below a quorum queue's 32.
FEW = 30


@dataclass(slots=True, eq=False)
class Entry:
    """A message to be sent, how often the broker has refused it (basic.nack), and where it was published last."""

    message: DelayedMessage
    refusals: int = 0
    address: PublishAddress | None = None
    #: Whether it was published without a delay, to its destination.
    at_once: bool = False


@dataclass(slots=True)
class Backlog:
    """The messages of one call of ``send``.

    After the first message that cannot be sent, or an error of the source, no more are taken from it. Each message that
    was taken is either confirmed or given up, so that the outcome is true of each.
    """

    conn_id: str
    source: Iterator[DelayedMessage]
    #: Called with each message that the broker confirmed.
    on_confirm: Callable[[DelayedMessage], None] | None = None
    report: SendReport = field(default_factory=SendReport)
    #: Whether anything was written to a broker.
    published: bool = False
    #: The messages that the broker refuses, the first of them first, each with the second of the send since when.
    refused: dict[Entry, float] = field(default_factory=dict)
    #: Destinations that refuse messages, or do not confirm them, in a send that does not try them again.
    refusing: set[str] = field(default_factory=set)
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
        if self.refused:
            self.refused.pop(entry, None)
        self.report.add(entry.message)
        if self.on_confirm:
            self.on_confirm(entry.message)

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Have messages sent again, before all others and in their order."""
        self._again.extendleft(reversed(list(entries)))

    def fail(self, entry: Entry, cause: DelayedError | str) -> None:
        """Give one message up, and take no more from the source."""
        self._ended = True
        self.refused.pop(entry, None)
        self._failures.append((entry.message.message_id, str(cause)))
        if isinstance(cause, InvalidMessage):
            cause.message_id = entry.message.message_id
        if self._cause is None and isinstance(cause, DelayedError):
            self._cause = cause

    def refuse(self, entry: Entry, reason: str) -> None:
        """Give up a message that its destination refuses, or does not confirm, at present."""
        self.refusing.add(entry.message.destination)
        self.fail(entry, reason)

    def give_up(self, cause: DelayedError | str) -> None:
        """Give up all messages that were taken and are not confirmed.

        The connection's failure is the cause for all, also if a message had failed before: a caller that sends again
        then counts no failure against the messages.
        """
        self._ended = True
        if isinstance(cause, TransportUnavailable) and not self._from_source:
            cause.report = self.report
            self._cause = cause
        while self._again:
            self.fail(self._again.popleft(), cause)

    def outcome(self) -> SendReport:
        """Return the report if all went well.

        :raises SendFailed: messages were given up.
        :raises DelayedError: the cause, if nothing at all was published, or if the connection was lost and all that
            was taken is confirmed.
        """
        if self._cause is not None and (self._from_source or not self.published or not self._failures):
            raise self._cause
        if self._failures:
            raise SendFailed(self.conn_id, self.report, self._failures, self.refusing) from self._cause
        return self.report


class BodySizes:
    """The size of the bodies that a broker takes. Only its refusal says how large its ``max_message_size`` is."""

    def __init__(self) -> None:
        #: Bodies of up to so many bytes were confirmed, or are surely taken.
        self.accepted = SURE_BYTES
        self._most: int | None = None

    def note_refusal(self, text: str) -> None:
        """Learn the limit from the broker's reason for closing a channel, if that is it."""
        if found := _TOO_LARGE.search(text):
            self._most = int(found[1])
            self.accepted = min(self.accepted, self._most)

    def refusal(self, body: bytes) -> LimitExceeded | None:
        """Return the error of a body that is larger than the limit, if the broker has named one."""
        if self._most is None or len(body) <= self._most:
            return None
        return LimitExceeded(
            "body",
            f"has {len(body):,} bytes, and the broker takes {self._most:,} (max_message_size); raise that, or keep the"
            " content elsewhere and send where it is",
        )


class Unconfirmed:
    """Entries that a channel has published and the broker has not confirmed, by delivery tag.

    With publisher confirms the broker counts a channel's messages from 1; this class counts on over channels.
    """

    def __init__(self) -> None:
        #: The tag of the last message that was published.
        self.last = 0
        #: The last tag of the channels before.
        self._before = 0
        self._entries: dict[int, Entry] = {}
        self._returned: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def settled(self) -> int:
        """How many published messages the broker has confirmed or refused."""
        return self.last - len(self._entries)

    def add(self, entry: Entry) -> None:
        """Note that an entry was published."""
        self.last += 1
        self._entries[self.last] = entry

    def returned(self, message_id: str, reason: str) -> None:
        """Note that the broker returned a message of this id. It confirms that message afterwards, like any other."""
        self._returned[message_id] = reason

    def settle(self, tag: int, multiple: bool) -> list[tuple[Entry, str | None]]:
        """Take out the entries of a confirm or a refusal; each with the reason if the message was returned.

        A reason counts for each message of that id, since the broker does not say which of several it returned.

        :param multiple: take out all entries up to the tag.
        """
        tag += self._before
        tags = self._up_to(tag) if multiple else [tag] if tag in self._entries else []
        entries = map(self._entries.pop, tags)
        if not self._returned:
            return [(entry, None) for entry in entries]
        return [(entry, self._returned.get(entry.message.message_id)) for entry in entries]

    def up_to(self, last: int) -> list[Entry]:
        """Return the entries that were published up to a tag, the oldest first."""
        return [self._entries[tag] for tag in self._up_to(last)]

    def take_out(self, destinations: Collection[str]) -> list[Entry]:
        """Take out the entries of destinations; a confirm that comes for one later is ignored."""
        tags = [tag for tag, entry in self._entries.items() if entry.message.destination in destinations]
        return [self._entries.pop(tag) for tag in tags]

    def clear(self) -> list[Entry]:
        """Take out all entries of a channel that was closed, in their order."""
        self._before = self.last
        entries = list(self._entries.values())
        self._entries.clear()
        return entries

    def _up_to(self, last: int) -> list[int]:
        tags = []
        for tag in self._entries:
            if tag > last:
                break
            tags.append(tag)
        return tags


@dataclass(slots=True)
class _Window:
    """Of one destination.

    :param most: unconfirmed messages.
    :param peak: unconfirmed messages since there was none.
    """

    unconfirmed: int = 0
    most: int = FEW
    peak: int = 0
    held: deque[Entry] = field(default_factory=deque)


class DestinationWindows:
    """How many unconfirmed messages a destination may have: few at first, twice as many each time it confirms them.

    A queue that hangs would else hold up all others: a broker reads nothing more from a channel while one queue has
    not taken so many messages of it, 32 if it is a quorum queue, 400 if it is a classic one.
    """

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}
        #: How many messages wait until their destination confirms others.
        self.held = 0

    def allows(self, entry: Entry) -> bool:
        """Return whether a message may be published now; otherwise hold it."""
        name = entry.message.destination
        window = self._windows.get(name)
        if window is None:
            window = self._windows[name] = _Window()
        if window.unconfirmed < window.most:
            return True
        self.hold(entry)
        return False

    def hold(self, entry: Entry) -> None:
        """Keep a message until its destination is ready, or confirms others."""
        self._windows.setdefault(entry.message.destination, _Window()).held.append(entry)
        self.held += 1

    def add(self, entry: Entry) -> None:
        """Note that a message was published."""
        window = self._windows[entry.message.destination]
        window.unconfirmed += 1
        window.peak = max(window.peak, window.unconfirmed)

    def answered(self, entry: Entry) -> Sequence[Entry]:
        """Note that a message was confirmed or refused, and return messages that need be held no longer."""
        window = self._windows[entry.message.destination]
        window.unconfirmed -= 1
        if window.held:
            window.most += 1
            ready = [window.held.popleft() for _ in range(min(2, len(window.held)))]
            self.held -= len(ready)
            return ready
        if not window.unconfirmed:
            # as many as it has just needed
            window.most, window.peak = max(FEW, window.peak), 0
        return ()

    def take_out(self, destinations: Collection[str] | None = None) -> list[Entry]:
        """Forget destinations, or all, and return the messages that were held for them."""
        names = list(self._windows) if destinations is None else destinations
        held = [entry for name in names if name in self._windows for entry in self._windows.pop(name).held]
        self.held -= len(held)
        return held
