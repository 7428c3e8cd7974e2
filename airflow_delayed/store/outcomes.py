"""What became of ids that were to be changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum

#: How many ids of each outcome are named after a change by filter; the rest is counted.
NAMED = 10_000


class Outcome(str, Enum):
    """What became of one id. The first six are done by the call itself, see :attr:`changed`."""

    CANCELLED = "cancelled"
    RESCHEDULED = "rescheduled"
    RETRIED = "retried"
    ERASED = "erased"
    PURGED = "purged"
    #: An id that was remembered is so no longer.
    FORGOTTEN = "forgotten"

    #: It is being handed over just now, which half a second of waiting did not see the end of. Ask again.
    IN_FLIGHT = "in flight"
    #: Too late.
    HANDED_OVER = "handed over"
    ALREADY_CANCELLED = "already cancelled"
    #: Purged or erased before.
    ALREADY_REMOVED = "already removed"
    #: There was nothing to do: it is due then already, or it waits and has not failed.
    UNCHANGED = "unchanged"
    #: Its ``expires_at`` has passed, so it would not be handed over.
    EXPIRED = "expired"
    #: Not rescheduled: its ``expires_at`` comes before the new due time.
    EXPIRES_FIRST = "expires first"
    #: Not rescheduled: it has failed; ``retry`` brings it back.
    FAILED = "failed"
    #: Never stored, or forgotten since.
    ABSENT = "absent"

    def __repr__(self) -> str:
        # as the text that it is, so that a printed result can be read
        return repr(self.value)

    @property
    def changed(self) -> bool:
        """Whether the call came in time and did what it says."""
        return self in _CHANGED


_CHANGED = frozenset(
    {
        Outcome.CANCELLED,
        Outcome.RESCHEDULED,
        Outcome.RETRIED,
        Outcome.ERASED,
        Outcome.PURGED,
        Outcome.FORGOTTEN,
    }
)


class Outcomes(dict[str, Outcome]):
    """What became of each id; ``counts`` has how many of each outcome.

    A change by ids names all of them. A change by filter names the first 10,000 of each outcome and counts them all.

    :param named: how many ids of each outcome are named; None: all.
    """

    def __init__(self, named: int | None = None) -> None:
        super().__init__()
        self.counts: dict[Outcome, int] = {}
        #: Of a change by filter with a limit: where those begin that it left out, for ``after=``.
        self.next: str | None = None
        #: Of a dry run with a limit: how many those are, counted up to a million.
        self.more = 0
        self._named = named

    @property
    def total(self) -> int:
        """How many ids there were, those included that are not named."""
        return sum(self.counts.values())

    @property
    def changed(self) -> int:
        """How many the call has changed, or would change if it was a dry run."""
        return sum(count for outcome, count in self.counts.items() if outcome.changed)

    def add(self, found: Mapping[str, Outcome], *, instead_of: Collection[str] = ()) -> None:
        """Note what became of ids.

        :param instead_of: these were in flight before, and are so no longer unless ``found`` says it.
        """
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

    def counts_with(self, found: Mapping[str, Outcome], *, instead_of: Collection[str] = ()) -> dict[Outcome, int]:
        """Return what ``counts`` would be after :meth:`add`."""
        then = Outcomes(0)
        then.counts = dict(self.counts)
        then.add(found, instead_of=instead_of)
        return then.counts
