"""The queue tables of the store's own database: a message is claimed, delivered and removed in one transaction."""

from __future__ import annotations

from concurrent.futures import Executor
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import Connection

from airflow_delayed.store import claiming, leases, settling, verdicts
from airflow_delayed.store.desk import Desk
from airflow_delayed.store.handover import Handover
from airflow_delayed.store.queue_table import QueueTables
from airflow_delayed.store.rate import TokenBucket
from airflow_delayed.store.report import BreakerTripped
from airflow_delayed.store.settling import Verdict
from airflow_delayed.store.tally import Tally


class TableLane:
    """Delivers into queue tables, exactly once. A message is handed over when it is due, never ahead."""

    def __init__(self, desk: Desk, conn_id: str, schema: str | None, bucket: TokenBucket | None) -> None:
        self.conn_id = conn_id
        self.deliver_conn_id: str | None = None
        self.window = self.reach = timedelta(0)
        self.tally = Tally(conn_id, desk.meter)
        self.unavailable: str | None = None
        self.cause: BaseException | None = None
        self._desk = desk
        self._policy = desk.policy
        self._bucket = bucket
        self._queues = QueueTables(schema)

    def run(self, clerk: Executor) -> None:
        """Deliver what is due, until there is nothing more.

        :param clerk: not needed here.
        :raises BreakerTripped: the database has failed for too long.
        """
        self._queues.look_again()
        while self._desk.may_claim:
            limit = self._policy.batch_size if self._bucket is None else self._bucket.take(self._policy.batch_size)
            if not limit:
                assert self._bucket is not None
                self._desk.sleep(self._bucket.wait(max(1, self._policy.batch_size // 10)))
                continue
            verdict, refused = self._desk.writing(partial(self._move, limit))
            rows = verdict.count
            if self._bucket is not None:
                self._bucket.give_back(limit - rows)
            self.tally.add(verdict)
            breaker = self._desk.recovery_breaker
            if refused and breaker.failure(verdict.failed[0][1], refused):
                raise BreakerTripped(str(breaker))
            if not rows:
                return

    def close(self) -> None:
        """Do nothing: the connections are the store's."""

    def _move(self, limit: int, connection: Connection, now: datetime) -> tuple[Verdict, int]:
        desk = self._desk
        wanted = claiming.Wanted(deliver_conn_id=None, due_by=now, limit=limit)
        rows = claiming.claim_locked(connection, desk.tables, wanted, now)
        if rows:
            # on MySQL and MariaDB the claim may have waited, and messages expired meanwhile
            now = desk.now(connection)
        found = verdicts.read(rows, self._policy.refused(row["Destination"] for row in rows), now)
        done = self._deliver(connection, found)
        verdict = verdicts.judge(rows, verdicts.Results.of(found, done), self._policy.number_of_retries, now)
        refused = 0
        if verdict.failed and self._policy.error_destination is not None:
            copies = verdicts.copies(verdict, self._policy.error_destination, now)
            refused = verdicts.set_aside(
                verdict,
                self._deliver(connection, verdicts.Read(copies)),
                self._policy.error_destination,
            )
        gone = [*verdict.gone, *verdict.aside]
        leases.note(connection, desk.tables, gone, leases.HANDED_OVER, now, dispatcher=desk.dispatcher)
        settling.remove(connection, desk.tables, gone)
        settling.note_failures(connection, desk.tables, verdict, now)
        leases.forget(connection, desk.tables, sorted(row["Id"] for row in verdict.others))
        return verdict, refused

    def _deliver(self, connection: Connection, found: verdicts.Read) -> Handover:
        failures = self._queues.deliver(connection, found.messages)
        return Handover([one.message_id for one in found.messages if one.message_id not in failures], failures)
