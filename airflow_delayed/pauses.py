"""How long to sleep before the clock is looked at again, since it may be set, or the machine suspended, meanwhile."""

from __future__ import annotations

from collections.abc import Callable

#: Seconds: a wait that is no longer than this is one exact sleep.
EXACT = 60.0
#: Seconds: no sleep is longer.
LONGEST = 3600.0

#: airflow_delayed.testing moves its clock in place of sleeping.
_skip: Callable[[float], object] | None = None


def pause(left: float) -> float:
    """Return how many seconds to sleep when so many are left.

    The last minute is slept in one go; before it a tenth of what is left, at least a minute and at most an hour. So a
    clock that is set forward makes a wait end late by no more than that.
    """
    if _skip is not None:
        _skip(left)
        return 0.0
    return left if left <= EXACT else min(max(EXACT, left / 10), LONGEST)
