"""What transports report: findings about a topology, and what became of the messages that were sent.

Below the errors, which carry these reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from operator import attrgetter
from typing import Protocol


class Countable(Protocol):
    """The part of a message that a report counts by."""

    @property
    def destination(self) -> str:
        """The queue that receives it."""
        ...

    @property
    def due_at(self) -> datetime:
        """When it is delivered."""
        ...


class State(str, Enum):
    """What was found of, or done to, one part of a topology."""

    OK = "ok"
    PLANNED = "would create"
    CREATED = "created"
    MISSING = "missing"
    DIFFERS = "differs"
    WOULD_REPAIR = "would repair"
    REPAIRED = "repaired"
    WOULD_DELETE = "would delete"
    DELETED = "deleted"
    #: All is there, and yet messages cannot pass for the time being; ``found`` says why.
    BLOCKED = "blocked"
    #: Messages are delivered, and something is to be known; ``found`` says what.
    WARNING = "warning"
    #: It could not be looked at, which is neither good nor bad; ``found`` says why.
    UNKNOWN = "unknown"


_UNREADY = (State.MISSING, State.DIFFERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One part of a topology: a queue, an exchange, a table; with ``argument``, one setting of it."""

    state: State
    resource: str
    argument: str | None = None
    wanted: object = None
    found: object = None
    #: The destination whose messages cannot be delivered because of it.
    destination: str | None = None
    #: A short name of this kind of finding that stays the same, such as ``destination-full``.
    code: str | None = None
    #: What happens because of it.
    why: str | None = None
    #: What a repair does to messages that are there already; None: there is no repair.
    repair: str | None = None

    def __str__(self) -> str:
        text = f"{self.resource} {self.argument}" if self.argument else self.resource
        if self.state in (State.DIFFERS, State.WOULD_REPAIR, State.REPAIRED):
            done = "" if self.state is State.DIFFERS else f"{self.state.value}, "
            text += f": {done}wanted {self.wanted!r}, found {self.found!r}"
        elif self.state in (State.WARNING, State.BLOCKED):
            text += f": {self.found}"
        elif self.state is State.UNKNOWN:
            text += f": unknown: {self.found}"
        else:
            text += f": {self.state.value}"
        if self.why:
            text += f" ({self.why})"
        if self.repair:
            text += f"; a repair {self.repair}"
        return text


@dataclass(frozen=True, slots=True)
class TopologyReport:
    """What ``install`` did or would do, or what ``verify`` found."""

    findings: tuple[Finding, ...] = ()

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Findings that keep messages from being delivered."""
        return tuple(found for found in self.findings if found.state in (*_UNREADY, State.BLOCKED))

    @property
    def unready(self) -> tuple[Finding, ...]:
        """Those of the problems that do not pass by themselves: what has to be made or changed before sending."""
        return tuple(found for found in self.findings if found.state in _UNREADY)

    @property
    def ok(self) -> bool:
        """Whether everything is there and as wanted."""
        return not self.problems

    @property
    def missing_destinations(self) -> tuple[str, ...]:
        """Destinations that do not exist."""
        return tuple(
            sorted({found.destination for found in self.problems if found.destination and found.state is State.MISSING})
        )

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def counts(self) -> dict[str, int]:
        """Count the findings by state."""
        counts: dict[str, int] = {}
        for found in self.findings:
            counts[found.state.value] = counts.get(found.state.value, 0) + 1
        return counts


@dataclass(slots=True)
class SendReport:
    """What became of the messages given to ``send``. ``duplicates`` were there already and are not in ``sent``.

    In a store, ``replaced`` took the place of what had the same id, and ``refused`` came too late for that: it had
    been handed over or cancelled, or was being handed over. Neither is in ``sent``.
    """

    sent: int = 0
    duplicates: int = 0
    replaced: int = 0
    refused: int = 0
    first_due: datetime | None = None
    last_due: datetime | None = None
    by_destination: dict[str, int] = field(default_factory=dict)

    def add(self, message: Countable) -> None:
        """Count a message that was confirmed."""
        self.sent += 1
        self._note(message)

    def add_all(self, messages: Sequence[Countable]) -> None:
        """Count messages that were confirmed."""
        if messages:
            dues = list(map(attrgetter("due_at"), messages))
            counts = Counter(map(attrgetter("destination"), messages))
            self.merge(SendReport(len(messages), first_due=min(dues), last_due=max(dues), by_destination=counts))

    def add_replaced(self, message: Countable) -> None:
        """Count a message that took the place of another."""
        self.replaced += 1
        self._note(message)

    def _note(self, message: Countable) -> None:
        self.by_destination[message.destination] = self.by_destination.get(message.destination, 0) + 1
        if self.first_due is None or message.due_at < self.first_due:
            self.first_due = message.due_at
        if self.last_due is None or message.due_at > self.last_due:
            self.last_due = message.due_at

    def merge(self, other: SendReport) -> None:
        """Add another report's counts to this one."""
        self.sent += other.sent
        self.duplicates += other.duplicates
        self.replaced += other.replaced
        self.refused += other.refused
        for destination, count in other.by_destination.items():
            self.by_destination[destination] = self.by_destination.get(destination, 0) + count
        dues = [due for due in (self.first_due, self.last_due, other.first_due, other.last_due) if due]
        if dues:
            self.first_due, self.last_due = min(dues), max(dues)
