"""The outcomes of a change of messages, by id and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

#: A change by filter names the first so many ids of each outcome.
NAMED_IDS = 10_000
#: A change by filter looks for messages out of its reach among so many that left the store last.
MAX_TOMBSTONES = 20_000
#: Where copies of a message may be that an erase does not reach.
NOT_ERASED = "not reached: rejects files, queue tables, brokers, spools of up to seven days, backups"


class Outcome(str, Enum):
    """The outcome of a change for one id. The first seven mean that the call changed it, see :attr:`changed`."""

    CANCELLED = "cancelled"
    #: The cancel was taken back: it waits again, or is again among the failed ones.
    RESTORED = "restored"
    RESCHEDULED = "rescheduled"
    RETRIED = "retried"
    ERASED = "erased"
    PURGED = "purged"
    #: The id is remembered no longer.
    FORGOTTEN = "forgotten"

    #: A dispatcher was still delivering it after half a second of waiting. Try again.
    IN_FLIGHT = "in flight"
    #: Too late: it was delivered.
    DISPATCHED = "dispatched"
    ALREADY_CANCELLED = "already cancelled"
    #: Purged or erased before.
    ALREADY_REMOVED = "already removed"
    #: Nothing to do: it is due at that time already, or it waits and has not failed.
    UNCHANGED = "unchanged"
    #: Its ``expires_at`` has passed, so it would not be delivered.
    EXPIRED = "expired"
    #: Not rescheduled: its ``expires_at`` comes before the new due time.
    EXPIRES_FIRST = "expires first"
    #: Not rescheduled: it has failed; ``retry`` brings it back.
    FAILED = "failed"
    #: Not restored: its due time has passed, so it would be dispatched at once; ``overdue_ok`` permits that.
    OVERDUE = "overdue"
    #: Not restored: a message of this id is in the store. It was restored before, or stored again.
    ALREADY_STORED = "already stored"
    #: Never stored, or forgotten since.
    ABSENT = "absent"

    #: That of Enum, which is written in Python, takes longer than all else with an outcome.
    __hash__ = str.__hash__

    def __repr__(self) -> str:
        # so that a printed result can be read
        return repr(self.value)

    @property
    def changed(self) -> bool:
        """Whether the call came in time and did what it says."""
        return self in _CHANGED


_CHANGED = frozenset(
    {
        Outcome.CANCELLED,
        Outcome.RESTORED,
        Outcome.RESCHEDULED,
        Outcome.RETRIED,
        Outcome.ERASED,
        Outcome.PURGED,
        Outcome.FORGOTTEN,
    }
)


@dataclass(slots=True)
class OutOfReach:
    """Messages of a change's selection that were dispatched to a broker and are not due yet, by connection."""

    messages: dict[str, int] = field(default_factory=dict)
    #: The last due time.
    until: dict[str, datetime] = field(default_factory=dict)
    #: There may be more: only the latest 20,000 messages that left the store were looked at.
    at_least: bool = False

    def add(self, conn_id: str, until: datetime, messages: int = 1) -> None:
        """Count messages of a connection."""
        self.messages[conn_id] = self.messages.get(conn_id, 0) + messages
        self.until[conn_id] = max(until, self.until.get(conn_id, until))

    def __str__(self) -> str:
        least = "at least " if self.at_least else ""
        parts = [
            f"{least}{count:,} {'was' if count == 1 else 'were'} dispatched to {conn_id},"
            f" {'is due at' if count == 1 else 'are due until'} {self.until[conn_id].isoformat(timespec='seconds')}"
            " and cannot be taken back"
            for conn_id, count in sorted(self.messages.items())
        ]
        if self.at_least and not parts:
            parts = [f"of what left the store before, only the latest {MAX_TOMBSTONES:,} messages were looked at"]
        return "; ".join(parts)

    def rows(self) -> list[dict[str, Any]]:
        """Return the number and the last due time of each connection."""
        return [
            {"deliver_conn_id": conn_id, "messages": count, "until": self.until[conn_id]}
            for conn_id, count in sorted(self.messages.items())
        ]


class Outcomes(dict[str, Outcome]):
    """The outcome by id; ``counts`` has the number of ids by outcome.

    A change by ids names all of them. A change by filter names the first 10,000 of each outcome and counts them all.
    """

    def __init__(self, named: int | None = None) -> None:
        super().__init__()
        self.counts: dict[Outcome, int] = {}
        #: After a change by filter with a limit: the token for ``after=`` that continues behind the limit.
        self.next: str | None = None
        #: After a change by filter with a limit: the number of messages behind it, up to a million; 1 for any number of
        #: them, unless it was a dry run.
        self.more = 0
        #: The row of the audit; None: nothing is recorded.
        self.audit_seq: int | None = None
        #: After a cancel, a reschedule or an erase: what it came too late for, although it is not due yet.
        self.out_of_reach = OutOfReach()
        #: After an erase: where else the messages may be.
        self.beyond = ""
        self._named = named

    @property
    def total(self) -> int:
        """The number of ids, named or not."""
        return sum(self.counts.values())

    @property
    def changed(self) -> int:
        """The number of ids that the call changed, or that a dry run would change."""
        return sum(count for outcome, count in self.counts.items() if outcome.changed)

    def add(self, found: Mapping[str, Outcome], *, instead_of: Collection[str] = ()) -> None:
        """Add the outcomes of ids; those of ``instead_of`` were counted as in flight before."""
        for message_id in instead_of:
            self.count(Outcome.IN_FLIGHT, -1)
            self.pop(message_id, None)
        for message_id, outcome in found.items():
            self.count(outcome)
            if self._named is None or self.counts[outcome] <= self._named:
                self[message_id] = outcome

    def count(self, outcome: Outcome, more: int = 1) -> None:
        """Count ids that are not named."""
        self.counts[outcome] = self.counts.get(outcome, 0) + more
        if not self.counts[outcome]:
            del self.counts[outcome]

    @property
    def in_words(self) -> str:
        """The counts as words: ``"3 cancelled, 1 dispatched"``, and what is out of reach; empty if there is nothing."""
        counts = ", ".join(f"{count:,} {outcome.value}" for outcome, count in self.counts.items())
        return "; ".join(filter(None, (counts, str(self.out_of_reach), self.beyond)))

    def counts_with(self, found: Mapping[str, Outcome], *, instead_of: Collection[str] = ()) -> dict[Outcome, int]:
        """Return the ``counts`` that :meth:`add` would lead to."""
        then = Counter(self.counts)
        then.update(found.values())
        then[Outcome.IN_FLIGHT] -= len(instead_of)
        return {outcome: count for outcome, count in then.items() if count}
