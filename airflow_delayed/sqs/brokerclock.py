"""What time it is by the broker, as far as its answers tell.

Every answer of SQS has a ``Date`` header, cut off to whole seconds, and a message that is received for the first time
has ``ApproximateFirstReceiveTimestamp``, in milliseconds. Both say what the broker's clock had at least reached when
the answer came. Between two answers this machine's monotonic clock counts on, which nobody sets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from email.utils import parsedate_to_datetime

from airflow_delayed.message import microseconds

#: Milliseconds by which a machine's clock may run fast, per second since an answer.
_FAST = 0.2
#: Seconds after which an answer no longer counts, once there is another.
_KEPT = 300.0


class BrokerClock:
    """Never ahead of the broker, so that what is computed by it is never early.

    :param monotonic: seconds from some moment; only differences count.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._least: tuple[float, float] | None = None  # milliseconds since 1970, and when that was heard

    def tick(self) -> float:
        """Return the moment to hand to :meth:`heard`; call it just before a request."""
        return self._monotonic()

    def heard(self, began: float, headers: Mapping[str, str], received_ms: Iterable[int] = ()) -> None:
        """Learn from an answer.

        :param began: what :meth:`tick` said before the request.
        :param headers: of the answer, with names in lower case as botocore has them.
        :param received_ms: milliseconds since 1970: moments that the answer says have come.
        """
        date_ms = _date_ms(headers.get("date", ""))
        if date_ms is None:
            return
        now = self._monotonic()
        # the header may be as old as the request, and has lost up to a second
        before = date_ms + 1000 + (now - began) * 1000
        least = max([date_ms, *(moment for moment in received_ms if moment < before)])
        known, at_begin = self._at(now), self._at(began)
        if (
            known is None
            or at_begin is None
            or least >= known
            or self._is_old(now)
            # the broker's clock went back
            or at_begin >= date_ms + 1000
        ):
            self._least = least, now

    def now_ms(self) -> int | None:
        """Return the milliseconds since 1970 that the broker's clock has reached; None if no answer had a date."""
        now = self._at(self._monotonic())
        return None if now is None else int(now)

    def _at(self, moment: float) -> float | None:
        if self._least is None:
            return None
        least, heard = self._least
        passed = moment - heard
        return least + passed * 1000 - abs(passed) * _FAST

    def _is_old(self, now: float) -> bool:
        return self._least is not None and now - self._least[1] > _KEPT


def _date_ms(text: str) -> int | None:
    try:
        date = parsedate_to_datetime(text)
        return microseconds(date) // 1000
    except (TypeError, ValueError):
        # none, no date, or one without a time zone
        return None
