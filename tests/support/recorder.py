"""A transport in memory, for tests of what happens before a broker is reached."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta, timezone

from airflow_delayed.delivery import DelayStore, Finding, SendReport, State, TopologyReport
from airflow_delayed.errors import LimitExceeded, SendFailed
from airflow_delayed.identity import digest_of
from airflow_delayed.message import DelayedMessage


class Recorder(DelayStore):
    """Takes messages of up to 100 bytes for the destinations that it has; a store if its horizon is zero."""

    horizon = timedelta(0)

    def __init__(
        self, conn_id: str = "recorder", *, destinations: Iterable[str] = ("mail",), horizon=timedelta(days=3000)
    ) -> None:
        self.conn_id = conn_id
        self.destinations = set(destinations)
        self.horizon = horizon
        self.sent: list[DelayedMessage] = []
        #: As a store: what others have sent, and told it of.
        self.noted: list[DelayedMessage] = []
        self.fail_after: int | None = None
        self.refused: set[str] = set()
        self.closed = 0

    @property
    def is_store(self) -> bool:
        return not self.horizon

    def install(self, destinations, *, create_destinations=False, dry_run=False):
        return TopologyReport()

    def verify(self, destinations, *, max_delay=None):
        return TopologyReport(
            tuple(
                Finding(
                    state=State.OK if name in self.destinations else State.MISSING,
                    resource=f"queue {name}",
                    destination=name,
                )
                for name in destinations
            )
        )

    def check(self, message: DelayedMessage, now: datetime) -> None:
        if len(message.body) > 100:
            raise LimitExceeded("body", f"is {len(message.body)} bytes, and the limit is 100")

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        report = SendReport()
        failures = []
        for message in messages:
            if self.fail_after is not None and len(self.sent) >= self.fail_after:
                raise SendFailed(self.conn_id, report, [(message.message_id, "the broker said no")])
            if message.message_id in self.refused:
                failures.append((message.message_id, "refused"))
                continue
            if message in self.noted:
                report.duplicates += 1
                continue
            self.sent.append(message)
            report.add(message)
        if failures:
            raise SendFailed(self.conn_id, report, failures)
        return report

    @property
    def ids(self) -> list[str]:
        return [message.message_id for message in self.sent]

    def conflicting(self, digests):
        there = {message.message_id: digest_of(message) for message in self.sent + self.noted}
        return sorted(name for name in digests if name in there and there[name] != digests[name])

    def known(self, ids):
        return {message.message_id for message in self.sent + self.noted} & set(ids)

    def note_sent(self, messages):
        self.noted += messages

    def last_seen(self):
        return self.now()

    def now(self) -> datetime:
        return datetime.now(timezone.utc)

    def close(self) -> None:
        self.closed += 1
