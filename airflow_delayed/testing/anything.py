"""The transport of a connection of which a test says nothing."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from airflow_delayed.delivery import Clock, Delivery, SendReport, TopologyReport
from airflow_delayed.message import DelayedMessage, utcnow


class AnyTransport(Delivery):
    """Takes any message with any delay, and any option.

    :param conn_id: a connection that need not exist.
    """

    horizon = timedelta(days=36_500)

    def __init__(self, conn_id: str, *, clock: Clock = utcnow, **options: object) -> None:
        self.conn_id = conn_id

    def install(self, destinations: Iterable[str], **options: object) -> TopologyReport:
        """Return an empty report."""
        return TopologyReport()

    def verify(self, destinations: Iterable[str], *, max_delay: timedelta | None = None) -> TopologyReport:
        """Return an empty report."""
        return TopologyReport()

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Let it pass."""

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Never used: a test has its own in its place."""
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing: nothing is open."""
