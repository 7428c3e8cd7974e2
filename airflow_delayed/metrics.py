"""Metrics through Airflow's Stats: counters, a timing, and a store's gauges while a dispatcher stays.

Names and tags are described in docs/airflow/metrics.md. Tags name connections, never a destination or a message.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING

from airflow_delayed.delivery import DelayStore
from airflow_delayed.errors import explained
from airflow_delayed.sqs.stats import CycleCounts
from airflow_delayed.threads import Ticker

if TYPE_CHECKING:
    from airflow_delayed.store.dispatch.report import DispatchReport
    from airflow_delayed.store.dispatch.settle import BatchOutcome

log = logging.getLogger(__name__)

#: Seconds between two reports of the gauges, while a dispatcher runs.
GAUGES_EVERY = 30.0
#: For how many times as long as the counts took they are not made again.
GAUGES_REST = 50

_SWITCHES = ("statsd_on", "statsd_datadog_enabled", "otel_on")
#: Characters that no part of a metric's name may have.
_NO_PART = re.compile(r"[^A-Za-z0-9_-]")


#: The counters of a dispatcher: what became of its messages.
OUTCOMES = ("dispatched", "retried", "failed", "expired", "error_destination")


def wanted() -> bool:
    """Return whether metrics go anywhere, by Airflow's section ``[metrics]``."""
    from airflow_delayed.compat import conf

    return any(conf.getboolean("metrics", switch, fallback=False) for switch in _SWITCHES)


@cache
def begin_outside_tasks() -> None:
    """Let Stats pass on metrics of a trigger or a command: Airflow initialises it for tasks alone."""
    from airflow_delayed.compat import conf, stats

    try:
        from airflow.sdk.observability.metrics.stats_utils import get_stats_factory
    except ImportError:
        # Airflow 3.1 begins by itself
        return
    stats().initialize(
        factory=get_stats_factory(), export_legacy_names=conf.getboolean("metrics", "legacy_names_on", fallback=False)
    )


def count_sent(conn_id: str, store_conn_id: str | None, sent: int, stored: int) -> None:
    """Count the messages that a task sent, and the messages that it stored."""
    _count({"sent": sent}, {"conn_id": conn_id})
    _count({"stored": stored}, {"conn_id": conn_id, "store_conn_id": str(store_conn_id)})


def count_outcomes(store_conn_id: str) -> Callable[[str, BatchOutcome], None]:
    """Return a function that counts each settled batch of a dispatcher, with the lateness of its latest message."""

    def count(conn_id: str, outcome: BatchOutcome) -> None:
        tags = {"conn_id": conn_id, "store_conn_id": store_conn_id}
        counts = {
            "dispatched": len(outcome.delivered),
            "retried": len(outcome.retry),
            "failed": len(outcome.failed),
            "expired": len(outcome.expired),
            "error_destination": len(outcome.dead_lettered),
        }
        _count(counts, tags)
        if outcome.delivered and outcome.at is not None:
            _lateness(outcome.at - min(row["Time"] for row in outcome.delivered), tags)

    return count


def count_report(store: str, conn_id: str, report: DispatchReport) -> None:
    """Count the messages that a dispatcher has taken from a custom store."""
    _count({name: getattr(report, name) for name in OUTCOMES}, {"conn_id": conn_id, "store_conn_id": store})


def count_cycled(conn_id: str) -> Callable[[CycleCounts], None]:
    """Return a function that counts each pass through a delay queue of SQS, with the lateness of its latest message."""

    def count(found: CycleCounts) -> None:
        tags = {"conn_id": conn_id}
        _count(
            {"dispatched": found.delivered, "retried": found.failed, "error_destination": found.to_error_queue},
            tags,
        )
        if found.late:
            _lateness(timedelta(milliseconds=found.latest_ms), tags)

    return count


def _count(counts: dict[str, int], tags: dict[str, str]) -> None:
    from airflow_delayed.compat import stats

    for name, count in counts.items():
        if count:
            stats().incr(f"delayed.{name}", count, tags=tags)


def _lateness(late: timedelta, tags: dict[str, str]) -> None:
    from airflow_delayed.compat import stats

    # a message that is dispatched before its due time is not late
    stats().timing("delayed.lateness", max(late, timedelta(0)), tags=tags)


def gauge(name: str, value: float, tags: dict[str, str]) -> None:
    """Set a gauge. Where Airflow drops tags, their values are parts of its name: else stores overwrite each other."""
    from airflow_delayed.compat import stats

    parts = [] if _keeps_tags() else [_NO_PART.sub("_", value) for value in tags.values()]
    stats().gauge(".".join(["delayed", name, *parts]), value, tags=tags)


def _keeps_tags() -> bool:
    from airflow_delayed.compat import conf

    if conf.getboolean("metrics", "statsd_datadog_enabled", fallback=False):
        return bool(conf.getboolean("metrics", "statsd_datadog_metrics_tags", fallback=True))
    return not conf.getboolean("metrics", "statsd_on", fallback=False) or bool(
        conf.getboolean("metrics", "statsd_influxdb_enabled", fallback=False)
    )


def tell_gauges(store: DelayStore, *, quick: bool = False) -> None:
    """Report a store's gauges, if metrics are switched on."""
    if not wanted():
        return
    try:
        store.gauges(quick=quick)
    except Exception as error:
        # the messages are dispatched: missing gauges are no reason to fail
        log.warning("the counts of store %r could not be reported as gauges: %s", store.conn_id, explained(error))


class Gauges:
    """Reports a store's gauges every half minute within a ``with`` block, in a thread that holds up no message.

    To count millions of due messages takes seconds of the database, which then has to dispatch them: what takes long is
    reported so seldom that it has at most 2 % of the time.
    """

    def __init__(self, store: DelayStore, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic = monotonic
        self._counts_again = -inf
        self._ticker: Ticker | None = None

    def __enter__(self) -> None:
        if wanted():
            self._ticker = Ticker("delayed-gauges", GAUGES_EVERY, self.tell)

    def tell(self) -> None:
        """Report all gauges, or while the counts rest only how late the oldest message is."""
        began = self._monotonic()
        if began < self._counts_again:
            tell_gauges(self._store, quick=True)
            return
        tell_gauges(self._store)
        ended = self._monotonic()
        self._counts_again = ended + (ended - began) * GAUGES_REST

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ticker is not None:
            # a count that takes long is not waited for
            self._ticker.close(1)
