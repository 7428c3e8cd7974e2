"""One connection of a dispatcher: one thread sends, while another settles what was sent and claims what comes next.

So the broker need not wait for the database, nor the database for the broker, and no transaction is open while
something is sent. A connection that is slow or lost holds up no other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, wait
from datetime import datetime, timedelta
from threading import Event

from airflow_delayed.backoff import Backoff
from airflow_delayed.delivery import Delivery
from airflow_delayed.message import UTC
from airflow_delayed.store import verdicts
from airflow_delayed.store.batch import Batch, Held
from airflow_delayed.store.breaker import Breaker
from airflow_delayed.store.desk import Claim, Desk
from airflow_delayed.store.handover import Handover, explained, hand_over
from airflow_delayed.store.place import Place
from airflow_delayed.store.rate import TokenBucket
from airflow_delayed.store.report import BreakerTripped
from airflow_delayed.store.settling import Row, Verdict
from airflow_delayed.store.tally import Tally

log = logging.getLogger(__name__)

#: How long one send should take, in seconds: a transport may need a while to begin, so what goes fast is sent in
#: several batches at a time; and what is sent is not known to be until its end, so they are not many.
SEND_SECONDS = 0.25
MOST_BATCHES = 10
#: What is handed over no more than this long before it is due is claimed ahead and held until then: it is late by as
#: much as it is handed over late. For all else the transport delays what remains.
EXACT_BELOW = timedelta(seconds=1)
#: How long before it is handed over a transport is given a message, in which it can connect.
CONNECT = timedelta(milliseconds=50)
#: Of messages handed over when they are due, those that follow each other so closely go in one send: a transport may
#: write one only when it has asked for the next.
CLOSE = timedelta(milliseconds=20)
#: Nothing is sent any more when less than this part of its lease is left.
MARGIN = 1 / 6


class Gate:
    """Lets a message pass when its time has come, as long as the dispatcher surely holds it, and is not to stop.

    :param window: how long before it is due its time comes.
    """

    def __init__(self, held: Held, desk: Desk, window: timedelta) -> None:
        self._held = held
        self._desk = desk
        self._window = window
        #: What is due until then has its time already.
        self._passes = datetime.min.replace(tzinfo=UTC)
        self.now = desk.clock

    def hold(self, due_at: datetime) -> None:
        """Wait until the time of a message has come."""
        if due_at <= self._passes:
            return
        while self.may_send():
            self._passes = self.now() + self._window
            if due_at <= self._passes:
                return
            self._desk.sleep((due_at - self._passes).total_seconds())

    def may_send(self) -> bool:
        """Return whether the next message may be sent."""
        return not self._desk.stop.is_set() and bool(self._held)


class Lane:
    """Hands over the messages of one connection.

    :param window: how long before its due time a message is handed over.
    :param bucket: limits the messages a second; shared with other connections.
    :param ahead: how long before it is handed over a message may be claimed, and held until then.
    """

    def __init__(
        self,
        desk: Desk,
        conn_id: str,
        transport: Delivery,
        window: timedelta,
        bucket: TokenBucket | None,
        ahead: timedelta = timedelta(0),
    ) -> None:
        self.conn_id = conn_id
        self.deliver_conn_id: str | None = conn_id
        self.window = window
        self._ahead = ahead if window < EXACT_BELOW else timedelta(0)
        #: How long before its due time a message is claimed.
        self.reach = window + self._ahead
        #: When all was claimed that was there; by the monotonic clock.
        self._claimed: float | None = None
        self.tally = Tally(conn_id, desk.meter)
        #: Why it is left alone for the rest of the run.
        self.unavailable: str | None = None
        self.cause: BaseException | None = None
        self._desk = desk
        self._policy = desk.policy
        self._transport = transport
        self._bucket = bucket
        self._place = Place()
        self._backoff = Backoff()
        self._goal = desk.policy.batch_size
        self._open: list[Batch] = []
        self._closed: dict[str, str] = {}
        limit = desk.policy.time_to_trigger_dispatch_circuit_breaker
        self._breaker = Breaker(f"connection {conn_id!r}: handing over", limit, desk.monotonic, desk.clock)

    def run(self, clerk: Executor) -> None:
        """Hand over what is due, until there is nothing more, or the breaker trips.

        :param clerk: one thread, for what is done beside the sending.
        :raises BreakerTripped: the store's own database has failed for too long.
        """
        self._closed.clear()
        try:
            with self._transport.kept_open():
                self._run(clerk)
        except BaseException:
            self._desk.try_to_settle([batch for batch in self._open if not batch.closed])
            raise
        finally:
            self._open.clear()

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()

    def _run(self, clerk: Executor) -> None:
        hurry = Event()
        hurry.set()
        sent: list[Batch] = []
        held = self._turn([], hurry)
        while held or sent:
            hurry.clear()
            ahead = clerk.submit(self._turn, sent, hurry)
            try:
                lost = self._send(held)
            finally:
                hurry.set()
                wait([ahead])
            sent, held = held, ahead.result()
            if self._desk.recovery_breaker.tripped:
                self._settle(sent)
                raise BreakerTripped(str(self._desk.recovery_breaker))
            if lost is None:
                continue
            # nothing more goes this way for a while, so it is free for others meanwhile
            self._settle([*sent, *held])
            if self._breaker.failure(explained(lost)):
                self.unavailable, self.cause = str(self._breaker), lost
                log.error("%s", self.unavailable)
            if self.unavailable or self._desk.stop.is_set():
                return
            log.warning("connection %r: %s; it is tried again", self.conn_id, explained(lost))
            self._desk.sleep(min(self._backoff.next(), self._breaker.remaining))
            sent, held = [], self._turn([], hurry)

    # -- beside the sending ------------------------------------------------------------------------------------------

    def _turn(self, sent: Sequence[Batch], hurry: Event) -> list[Batch]:
        """Settle what was sent, and claim what is sent next.

        Both in one transaction, unless there is a wait in between.

        :param hurry: set when the sender has nothing to do any more.
        """
        if self._ahead or self._bucket is not None:
            # it may have to wait, and what was sent is not to wait with it
            self._settle(sent)
            sent = ()
        if self._ahead and self._claimed is not None:
            # half of what is held ahead is time enough to claim the next, in not too small pieces
            hurry.wait(max(0.0, self._claimed + self._ahead.total_seconds() / 2 - self._desk.monotonic()))
        self._claimed = None
        limit = self._allowed()
        if not limit:
            self._settle(sent)
            return []
        began = self._desk.monotonic()
        try:
            claimed = self._desk.claim(Claim(self.deliver_conn_id, self.reach, limit, self._place), sent)
        finally:
            self._count([batch for batch in sent if batch.closed])
        self._open += claimed
        rows = sum(len(batch.rows) for batch in claimed)
        if self._bucket is not None:
            self._bucket.give_back(limit - rows)
        if rows < limit:
            self._claimed = began
        return claimed

    def _allowed(self) -> int:
        """Return how many messages may be claimed, as soon as that is one; 0: no more."""
        while self._desk.may_claim:
            if limit := self._goal if self._bucket is None else self._bucket.take(self._goal):
                return limit
            self._wait_for_tokens()
        return 0

    def _wait_for_tokens(self) -> None:
        assert self._bucket is not None
        self._desk.sleep(self._bucket.wait(max(1, self._policy.batch_size // 10)))

    def _settle(self, batches: Sequence[Batch]) -> None:
        self._desk.settle(batches)
        self._count(batches)

    def _count(self, settled: Sequence[Batch]) -> None:
        for batch in settled:
            if batch.verdict is not None:
                self.tally.add(batch.verdict)
        if settled:
            self._open = [batch for batch in self._open if not batch.closed]

    # -- sending -----------------------------------------------------------------------------------------------------

    def _send(self, batches: Sequence[Batch]) -> Exception | None:
        """Send what is held, give each batch its verdict, and return the connection's failure if there was one."""
        if not batches:
            return None
        desk = self._desk
        held = Held(batches, self._policy.claim_timeout.total_seconds() * MARGIN, desk.monotonic)
        gate = Gate(held, desk, self.window)
        found, done = verdicts.Read(), Handover()
        for rows in self._in_time([row for batch in batches for row in batch.rows], gate):
            now = desk.clock()
            refused = self._policy.refused(row["Destination"] for row in rows)
            some = verdicts.read(rows, {**self._closed, **done.closed, **refused}, now)
            found.merge(some)
            began = desk.monotonic()
            sent = hand_over(self._transport, some.messages, now, gate) if some.messages else Handover()
            if not self._ahead and not sent.stopped:
                self._adapt(desk.monotonic() - began)
            done.merge(sent)
            if done.lost is not None or done.stopped:
                break
        self._closed.update(done.closed)
        if done.confirmed or (done.answered and done.lost is None):
            self._breaker.success()
            self._backoff.reset()
        results = verdicts.Results.of(found, done)
        for batch in batches:
            batch.verdict = verdicts.judge(batch.rows, results, self._policy.number_of_retries, desk.clock())
            if batch.verdict.failed and self._policy.error_destination is not None:
                done.lost = self._set_aside(batch.verdict, self._policy.error_destination, gate, done.lost)
        return done.lost

    def _adapt(self, took: float) -> None:
        """Send more at a time if that went fast, and less if it took too long."""
        least = self._policy.batch_size
        if took > SEND_SECONDS:
            goal = self._goal // 2
        else:
            goal = self._goal * (4 if took < SEND_SECONDS / 4 else 2 if took < SEND_SECONDS / 2 else 1)
        self._goal = max(least, min(MOST_BATCHES * least, goal))

    def _in_time(self, rows: Sequence[Row], gate: Gate) -> Iterator[Sequence[Row]]:
        """Yield rows shortly before their time has come, those together that follow each other closely."""
        if not self._ahead:
            yield rows
            return
        rest = sorted(rows, key=lambda row: row["Time"])
        while rest and gate.may_send():
            end = self._desk.clock() + self.window
            left = rest[0]["Time"] - (end + CONNECT)
            if left > timedelta(0):
                self._desk.sleep(left.total_seconds())
                continue
            count, last = 0, end
            while count < len(rest) and rest[count]["Time"] <= last + CLOSE:
                last = max(last, rest[count]["Time"])
                count += 1
            count = max(count, 1)
            yield rest[:count]
            rest = rest[count:]

    def _set_aside(
        self, verdict: Verdict, error_destination: str, gate: Gate, lost: Exception | None
    ) -> Exception | None:
        """Send copies of what is given up, if the connection is not lost already, and return its failure."""
        done = Handover(lost=lost)
        if lost is None:
            now = self._desk.clock()
            made = verdicts.copies(verdict, error_destination, now)
            done = hand_over(self._transport, made, now, gate) if made else done
        refused = verdicts.set_aside(verdict, done, error_destination)
        if refused:
            self._desk.recovery_breaker.failure(next(iter(done.failures.values())).reason, refused)
        return done.lost
