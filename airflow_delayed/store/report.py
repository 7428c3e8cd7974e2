"""What a dispatcher's run did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from airflow_delayed.errors import DelayedError, TransportUnavailable, some
from airflow_delayed.message import DelayedMessage, parse_moment


@dataclass(slots=True)
class DispatchReport:
    """Counts of one run.

    ``dispatched`` were handed over, and ``error_destination`` given up and sent there; both are removed. ``retried``
    counts tries that failed and are to be made again; ``failed`` are given up, ``expired`` came too late, and both are
    moved to the table of failed messages. ``forgotten`` are ids that are remembered no longer. ``left`` are due within
    the lookahead and belong to connections that are not on the dispatcher's list; it did not touch them.
    """

    dispatched: int = 0
    retried: int = 0
    failed: int = 0
    expired: int = 0
    error_destination: int = 0
    forgotten: int = 0
    left: int = 0
    by_connection: dict[str, int] = field(default_factory=dict)
    first_due: datetime | None = None
    last_due: datetime | None = None

    def add(self, conn_id: str, message: DelayedMessage) -> None:
        """Count a message that was handed over and removed."""
        self.add_all(conn_id, 1, message.due_at, message.due_at)

    def add_all(self, conn_id: str, count: int, first_due: datetime, last_due: datetime) -> None:
        """Count messages that were handed over and removed."""
        self.dispatched += count
        self.by_connection[conn_id] = self.by_connection.get(conn_id, 0) + count
        self.first_due = min(self.first_due or first_due, first_due)
        self.last_due = max(self.last_due or last_due, last_due)

    def merge(self, other: DispatchReport) -> None:
        """Add another report's counts to this one."""
        for name in ("retried", "failed", "expired", "error_destination", "forgotten", "left"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for conn_id, count in other.by_connection.items():
            assert other.first_due is not None
            assert other.last_due is not None
            self.add_all(conn_id, count, other.first_due, other.last_due)

    def __str__(self) -> str:
        """Return the counts as a line of the log; of what is not dispatched only those that are not 0."""
        line = f"{self.dispatched:,} messages dispatched"
        if self.by_connection:
            counts = ", ".join(f"{conn_id}: {count:,}" for conn_id, count in self.by_connection.items())
            line += f" ({counts})"
        if self.first_due and self.last_due:
            line += f", due from {self.first_due.isoformat()} to {self.last_due.isoformat()}"
        others = {
            "retried": self.retried,
            "failed": self.failed,
            "expired": self.expired,
            "sent to the error destination": self.error_destination,
            "left for other dispatchers": self.left,
            "ids forgotten": self.forgotten,
        }
        return "; ".join([line, *(f"{count:,} {name}" for name, count in others.items() if count)])

    def summary(self) -> dict[str, Any]:
        """Return the counts as plain values, for an XCom."""
        return {
            "dispatched": self.dispatched,
            "retried": self.retried,
            "failed": self.failed,
            "expired": self.expired,
            "error_destination": self.error_destination,
            "forgotten": self.forgotten,
            "left_for_others": self.left,
            "by_connection": dict(self.by_connection),
            "first_due": self.first_due.isoformat() if self.first_due else None,
            "last_due": self.last_due.isoformat() if self.last_due else None,
        }

    @classmethod
    def restored(cls, summary: Mapping[str, Any]) -> DispatchReport:
        """Return the report of a summary; what it does not name is 0."""
        values: dict[str, Any] = {name: summary.get(name, 0) for name in _COUNTS}
        values |= {name: parse_moment(name, summary[name]) for name in _DUES if summary.get(name)}
        return cls(
            left=summary.get("left_for_others", 0), by_connection=dict(summary.get("by_connection", {})), **values
        )


_COUNTS = ("dispatched", "retried", "failed", "expired", "error_destination", "forgotten")
_DUES = ("first_due", "last_due")


class BreakerTripped(TransportUnavailable):
    """Work in the store has failed for too long, or too often. What is not handed over is still in the store."""


class DispatchFailed(DelayedError):
    """A run handed over what it could, and not everything.

    ``failures`` has a reason by message id for those that were given up and are now in the table of failed messages,
    the first thousand of them; ``unavailable`` has a reason for each connection that failed until its breaker tripped,
    whose messages are as they were. Messages that only wait for their next try do not fail a run.
    """

    def __init__(
        self,
        conn_id: str,
        report: DispatchReport,
        failures: Mapping[str, str],
        unavailable: Mapping[str, str],
        kept: str = "in the table of failed messages; retry them when the cause is gone",
    ) -> None:
        cases = [f"connection {name!r} is not available: {reason}" for name, reason in unavailable.items()]
        cases += [" ".join(f"message {message_id}: {reason}".split()) for message_id, reason in failures.items()]
        advice = []
        if report.failed:
            advice.append(f"The {report.failed:,} are {kept}")
        if unavailable:
            advice.append(
                "What waits for a connection is still in the store; run the dispatcher again when the cause is gone"
            )
        super().__init__(
            f"store {conn_id!r}: {report.dispatched:,} messages were handed over, {report.failed:,} failed,"
            f" {len(unavailable)} connections are not available: {some(cases)}. {'. '.join(advice)}"
        )
        self.report = report
        self.failures = dict(failures)
        self.unavailable = dict(unavailable)
