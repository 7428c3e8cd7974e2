"""What is told through Airflow's Stats: counters, a timing, and a store's gauges while a dispatcher stays.

Names and tags are described in docs/airflow/metrics.md. Tags name connections, never a destination or a message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import copy_context
from datetime import timedelta
from functools import cache
from threading import Event, Thread
from types import TracebackType

from airflow_delayed.delivery import DelayStore
from airflow_delayed.sqs.counts import Counts
from airflow_delayed.store.handover import explained
from airflow_delayed.store.report import DispatchReport
from airflow_delayed.store.settling import Verdict

log = logging.getLogger(__name__)

#: Seconds between two looks for gauges, while a dispatcher stays.
EVERY = 30.0

_SWITCHES = ("statsd_on", "statsd_datadog_enabled", "otel_on")


def wanted() -> bool:
    """Return whether Airflow passes metrics on to anything (its section ``[metrics]``)."""
    from airflow_delayed.compat import conf

    return any(conf.getboolean("metrics", switch, fallback=False) for switch in _SWITCHES)


@cache
def begin_in_trigger() -> None:
    """Let Stats pass on what a trigger tells: Airflow sees to that for tasks alone."""
    from airflow_delayed.compat import conf, stats

    try:
        from airflow.sdk.observability.metrics.stats_utils import get_stats_factory
    except ImportError:
        # Airflow 3.1 begins by itself
        return
    stats().initialize(
        factory=get_stats_factory(), export_legacy_names=conf.getboolean("metrics", "legacy_names_on", fallback=False)
    )


def count_sent(conn_id: str, store_conn_id: str | None, sent: int, held: int) -> None:
    """Count what a task sent, and what it left in a store."""
    _count({"sent": sent}, {"conn_id": conn_id})
    _count({"held": held}, {"conn_id": conn_id, "store_conn_id": str(store_conn_id)})


def count_verdicts(store_conn_id: str) -> Callable[[str, Verdict], None]:
    """Return what counts each batch that a dispatcher has settled, with how late the latest of it was handed over."""

    def count(conn_id: str, verdict: Verdict) -> None:
        tags = {"conn_id": conn_id, "store_conn_id": store_conn_id}
        counts = {
            "dispatched": len(verdict.gone),
            "retried": len(verdict.again),
            "failed": len(verdict.failed),
            "expired": len(verdict.expired),
            "error_destination": len(verdict.aside),
        }
        _count(counts, tags)
        if verdict.gone and verdict.at is not None:
            _lateness(verdict.at - min(row["Time"] for row in verdict.gone), tags)

    return count


def count_report(store: str, conn_id: str, report: DispatchReport) -> None:
    """Count what a dispatcher did with a store of the user's own."""
    names = ("dispatched", "retried", "failed", "expired", "error_destination")
    _count({name: getattr(report, name) for name in names}, {"conn_id": conn_id, "store_conn_id": store})


def count_cycled(conn_id: str) -> Callable[[Counts], None]:
    """Return what counts each look at a delay queue of SQS, with how late the latest message went on."""

    def count(found: Counts) -> None:
        tags = {"conn_id": conn_id}
        _count(
            {"dispatched": found.delivered, "retried": found.failed, "error_destination": found.set_aside},
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

    # what is handed over ahead of its due time is not late
    stats().timing("delayed.lateness", max(late, timedelta(0)), tags=tags)


def tell_gauges(store: DelayStore) -> None:
    """Tell a store's gauges, if anybody takes them: on a large store the counts take a second."""
    if not wanted():
        return
    try:
        store.gauges()
    except Exception as error:
        # what was handed over was handed over, whatever can be told of it
        log.warning("the counts of store %r could not be told as gauges: %s", store.conn_id, explained(error))


class Gauges:
    """Tells a store's gauges every half minute within a ``with`` block, in a thread that holds up no message."""

    def __init__(self, store: DelayStore) -> None:
        self._store = store
        self._stop = Event()
        self._thread: Thread | None = None

    def __enter__(self) -> None:
        if wanted():
            # in the caller's context, so that it logs where the caller does
            self._thread = Thread(target=copy_context().run, args=(self._run,), name="delayed-gauges", daemon=True)
            self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            # a count that takes long is not waited for
            self._thread.join(timeout=1)

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            tell_gauges(self._store)
