"""What a dispatcher's run did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from airflow_delayed.errors import DelayedError, some
from airflow_delayed.message import DelayedMessage


@dataclass(slots=True)
class DispatchReport:
    """Counts of one run. ``left`` and ``expired`` are rows that it did not touch.

    ``left`` are due within the lookahead and belong to connections that are not on the dispatcher's list; ``expired``
    are rows of its own connections whose ExpiresAt has passed; they stay in the table.
    """

    dispatched: int = 0
    failed: int = 0
    expired: int = 0
    left: int = 0
    by_connection: dict[str, int] = field(default_factory=dict)
    first_due: datetime | None = None
    last_due: datetime | None = None

    def add(self, conn_id: str, message: DelayedMessage) -> None:
        """Count a message that was handed over and removed."""
        self.dispatched += 1
        self.by_connection[conn_id] = self.by_connection.get(conn_id, 0) + 1
        self.first_due = min(self.first_due or message.due_at, message.due_at)
        self.last_due = max(self.last_due or message.due_at, message.due_at)

    def summary(self) -> dict[str, Any]:
        """Return the counts as plain values, for an XCom."""
        return {
            "dispatched": self.dispatched,
            "failed": self.failed,
            "expired": self.expired,
            "left_for_others": self.left,
            "by_connection": dict(self.by_connection),
            "first_due": self.first_due.isoformat() if self.first_due else None,
            "last_due": self.last_due.isoformat() if self.last_due else None,
        }


class DispatchFailed(DelayedError):
    """A run handed over what it could, and not everything. What it could not hand over is still in the store.

    ``failures`` has a reason by message id (RetryCount is one more for each); ``unavailable`` has a reason for each
    connection that could not be reached, whose messages are as they were.
    """

    def __init__(
        self, conn_id: str, report: DispatchReport, failures: Mapping[str, str], unavailable: Mapping[str, str]
    ) -> None:
        cases = [f"connection {name!r} is not available: {reason}" for name, reason in unavailable.items()]
        cases += [f"message {message_id}: {reason}" for message_id, reason in failures.items()]
        super().__init__(
            f"store {conn_id!r}: {report.dispatched:,} messages were handed over, {len(failures):,} failed,"
            f" {len(unavailable)} connections are not available: {some(cases)}. All of these are still in the store;"
            " run the dispatcher again when the cause is gone"
        )
        self.report = report
        self.failures = dict(failures)
        self.unavailable = dict(unavailable)
