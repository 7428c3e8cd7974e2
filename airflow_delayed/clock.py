"""The present time, the length of a sleep (before a retry, until a due time), and local times of a named time zone.

A time without a zone is refused by :func:`airflow_delayed.message.utc`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from enum import Enum
from random import random
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from airflow_delayed.errors import InputError, InvalidMessage

Clock = Callable[[], datetime]

#: Doublings of a first sleep: more change nothing below any longest sleep, and would overflow.
_DOUBLINGS = 60
#: Seconds: a wait of at most this length is one exact sleep.
EXACT = 60.0
#: Seconds: no sleep is longer.
LONGEST = 3600.0


def _machine_time() -> datetime:
    return datetime.now(timezone.utc)


#: airflow_delayed.testing replaces it by a clock that a test moves.
_present = _machine_time
#: airflow_delayed.testing moves its clock in place of sleeping.
_skip: Callable[[float], object] | None = None


def utcnow() -> datetime:
    """Return the machine's time; everything that needs a clock takes one, and this is the default."""
    return _present()


def pause(left: float) -> float:
    """Return how many seconds to sleep when so many are left until a due time.

    The last minute is slept in one go; before it a tenth of what is left, at least a minute and at most an hour. The
    clock may be set, or the machine suspended, meanwhile: so the wait ends late by no more than one such sleep.
    """
    if _skip is not None:
        _skip(left)
        return 0.0
    return left if left <= EXACT else min(max(EXACT, left / 10), LONGEST)


def next_sleep(failures: int, *, first: float, longest: float, chance: Callable[[], float] = random) -> float:
    """Return the seconds to sleep after so many failures in a row: doubled each time, less up to half by chance.

    Without chance, all clients that failed together would try again together, every time.

    :param chance: returns a number from 0 to less than 1.
    """
    full: float = min(longest, first * 2 ** max(0, min(failures - 1, _DOUBLINGS)))
    return full - full * chance() / 2


class Backoff:
    """The growing sleeps between the tries of one operation."""

    def __init__(self, first: float = 0.5, longest: float = 5.0) -> None:
        self._first = first
        self._longest = longest
        self._failures = 0

    def next(self) -> float:
        """Count a failure, and return the seconds to sleep."""
        self._failures += 1
        return next_sleep(self._failures, first=self._first, longest=self._longest)

    def reset(self) -> None:
        """Begin with the shortest sleep again after a success."""
        self._failures = 0


class Shift(Enum):
    """The effect of daylight saving on a local time."""

    NONE = "none"
    GAP = "gap"
    FOLD = "fold"


def zone(name: str) -> ZoneInfo:
    """Return a time zone by its IANA name."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InputError(f"timezone={name!r} is not an IANA time zone; write it as 'Europe/Berlin' or 'UTC'") from None


def resolve(column: str, local: datetime, where: ZoneInfo) -> tuple[datetime, Shift]:
    """Return the UTC time of a naive local time.

    A time that a gap skips moves later by the gap's length; of a time that happens twice the first is taken.

    :raises InvalidMessage: it lies outside the years 1 to 9999 in UTC.
    """
    first = local.replace(tzinfo=where, fold=0)
    try:
        moment = first.astimezone(timezone.utc)
    except OverflowError:
        raise InvalidMessage(column, f"{local} lies outside the years 1 to 9999 in UTC") from None
    if first.utcoffset() == local.replace(tzinfo=where, fold=1).utcoffset():
        return moment, Shift.NONE
    happened = moment.astimezone(where).replace(tzinfo=None, fold=0) == local.replace(fold=0)
    return moment, Shift.FOLD if happened else Shift.GAP
