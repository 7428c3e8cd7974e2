"""A sender and a receiver that go on while a cluster's nodes fail, and what became of the messages in one row."""

from __future__ import annotations

import itertools
import logging
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from datetime import datetime, timedelta, timezone

import pika
import pytest
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError

from airflow_delayed.delivery import SendReport, TopologyReport
from airflow_delayed.errors import DelayedError
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq.properties import DUE_AT

UTC = timezone.utc
#: Seconds that a run may take after its last fault has ended.
PATIENCE = 300
#: Seconds without an arrival after which what is still to come counts as stuck.
STUCK = 45


def messages_due(count: int, *, rate: float, after: tuple[float, float], seed: int = 1) -> list[DelayedMessage]:
    """Return messages, each due so many seconds after it is sent at a rate per second from now on."""
    choose, start = random.Random(seed), datetime.now(UTC)
    return [
        DelayedMessage(
            destination="orders",
            body=b"%d" % number,
            due_at=start + timedelta(seconds=number / rate + choose.uniform(*after)),
            message_id=f"m{number}",
        )
        for number in range(count)
    ]


class Confirms:
    """When each message was confirmed, by the reports of all sends.

    A report counts a message when its confirm comes, which no caller of ``send`` sees before the end.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: dict[str, float] = {}
        count = SendReport.add

        def add(report: SendReport, message: DelayedMessage) -> None:
            self.times.setdefault(message.message_id, time.monotonic())
            count(report, message)

        monkeypatch.setattr(SendReport, "add", add)


class Sender(threading.Thread):
    """Sends messages at a rate until all are confirmed; after an error again what is not, as a task's retry does."""

    def __init__(
        self, hook: RabbitMQDelayHook, batch: Iterable[DelayedMessage], confirms: Confirms, rate: float
    ) -> None:
        super().__init__(daemon=True, name="sender")
        self.errors: list[str] = []
        self._hook, self._batch, self._confirms, self._rate = hook, list(batch), confirms, rate
        self._first = time.monotonic()
        self._ends = threading.Event()

    def end(self) -> None:
        """Send no more, and wait until the last send has ended."""
        self._ends.set()
        self.join(PATIENCE)

    def run(self) -> None:
        self._first = time.monotonic()
        while not self._ends.is_set():
            rest = [message for message in self._batch if message.message_id not in self._confirms.times]
            if not rest:
                return
            try:
                self._hook.send(self._paced(rest))
            except DelayedError as error:
                self.errors.append(str(error))
                time.sleep(1)

    def _paced(self, rest: list[DelayedMessage]) -> Iterator[DelayedMessage]:
        start = time.monotonic()
        for number, message in enumerate(rest):
            if (ahead := start + number / self._rate - time.monotonic()) > 0:
                time.sleep(ahead)
            if self._ends.is_set():
                return
            yield message

    def silence(self) -> float:
        """Return the most seconds without a confirm from the first message to the last confirm."""
        times = [self._first, *sorted(self._confirms.times.values())]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


class Receiver(threading.Thread):
    """Consumes the destination from the first node that answers, from another one when the connection is lost."""

    def __init__(self, hosts: list[pika.ConnectionParameters]) -> None:
        super().__init__(daemon=True, name="receiver")
        #: For each arrival its id, and the seconds after its due time.
        self.arrivals: list[tuple[str, float]] = []
        self._hosts = hosts
        self._ends = threading.Event()

    def run(self) -> None:
        while not self._ends.is_set():
            for host in self._hosts:
                try:
                    self._consume(host)
                except (AMQPError, AMQPConnectorException, OSError):
                    time.sleep(0.5)

    def wait_for(self, ids: set[str]) -> set[str]:
        """Wait until these have arrived, or nothing has for a while, and return which are missing."""
        came, since = len(self.arrivals), time.monotonic()
        while missing := ids - {name for name, _ in list(self.arrivals)}:
            if len(self.arrivals) > came:
                came, since = len(self.arrivals), time.monotonic()
            if time.monotonic() - since > STUCK:
                return missing
            time.sleep(0.5)
        return set()

    def end(self) -> None:
        """Stop consuming, and wait until that is so."""
        self._ends.set()
        self.join(PATIENCE)

    def _consume(self, host: pika.ConnectionParameters) -> None:
        def take(channel, method, properties, body) -> None:
            late = datetime.now(UTC) - datetime.fromisoformat(properties.headers[DUE_AT])
            channel.basic_ack(method.delivery_tag)
            self.arrivals.append((properties.message_id, late.total_seconds()))

        with pika.BlockingConnection(host) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=200)
            channel.basic_consume("orders", take)
            while not self._ends.is_set():
                connection.process_data_events(time_limit=0.2)


@dataclass
class Outcome:
    """A row of the table. Times in seconds; ``late`` has the median, the 99th percentile and the most.

    ``named``: from the fault to the first line of the log that names its cause, or to the end of such a ``verify()``.
    """

    run: str
    confirmed: int
    arrived: int
    twice: int
    lost: int
    early: int
    late: str
    silence: str
    named: float | None
    notes: list[str]


def table(rows: Iterable[Outcome]) -> list[str]:
    """Return the lines of a table, with each row's notes below it."""
    columns = [column.name for column in fields(Outcome) if column.name != "notes"]
    each = list(rows)
    cells = [columns, *([str(getattr(row, name)) for name in columns] for row in each)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return [lines[0], *(text for line, row in zip(lines[1:], each, strict=True) for text in (line, *row.notes))]


class Chaos:
    """A virtual host of a cluster with a destination, to which messages are sent while a test makes faults."""

    def __init__(
        self,
        hook: RabbitMQDelayHook,
        hosts: list[pika.ConnectionParameters],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        self._hook, self._hosts, self._caplog = hook, hosts, caplog
        self._confirms = Confirms(monkeypatch)
        self._notes: list[str] = []
        #: What verify() reported, and when, in Unix seconds.
        self._findings: list[tuple[float, str]] = []
        self._since = 0.0
        # Airflow's own level is INFO, and pika has dozens of lines of that level for each connection
        caplog.set_level(logging.CRITICAL, logger="pika")
        # that has set the level of what is captured too
        caplog.handler.setLevel(logging.WARNING)

    def play(
        self,
        run: str,
        faults: Callable[[], None],
        batch: list[DelayedMessage],
        *,
        rate: float,
        cause: str,
        free_stuck: Callable[[], None],
        before: float = 5,
    ) -> Outcome:
        """Send messages at a rate per second, make faults some seconds later, and wait for all arrivals.

        :param cause: a regular expression of texts that name the cause.
        :param free_stuck: called when messages do not arrive any more, though there are some to come.
        """
        receiver, sender = Receiver(self._hosts), Sender(self._hook, batch, self._confirms, rate)
        receiver.start()
        sender.start()
        try:
            time.sleep(before)
            self.fault_begins()
            faults()
            sender.join(PATIENCE)
            confirmed = set(self._confirms.times)
            last_due = max(message.due_at for message in batch)
            time.sleep(max(0, (last_due - datetime.now(UTC)).total_seconds()))
            if missing := receiver.wait_for(confirmed):
                after = time.time() - self._since
                self._notes.append(f"{len(missing)} stuck {after:.0f} s after the fault; leaders moved")
                free_stuck()
                receiver.wait_for(confirmed)
        finally:
            # also after a test that failed, for the next one has messages of the same ids
            sender.end()
            receiver.end()
        return self._outcome(run, cause, sender, confirmed, receiver.arrivals)

    def fault_begins(self) -> None:
        """Count times from now on, in a run whose fault comes some time after its beginning."""
        self._since = time.time()

    def verify(self) -> TopologyReport:
        """Note what ``verify()`` reports in the middle of a fault, and how long it takes; return it."""
        began = time.time()
        report = self._hook.verify(["orders"])
        ended = time.time()
        found = [finding for finding in report if finding.severity != "ok"]
        self._findings += [(ended, str(finding)) for finding in found]
        kinds = Counter(f"{finding.severity} {finding.code}" for finding in found)
        text = ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in kinds.items())
        after = began - self._since
        self._notes.append(f"verify() after {after:.0f} s, in {ended - began:.1f} s: ok={report.ok}; {text}")
        return report

    def _outcome(
        self, run: str, cause: str, sender: Sender, confirmed: set[str], arrivals: list[tuple[str, float]]
    ) -> Outcome:
        times = Counter(name for name, _ in arrivals)
        late = sorted(seconds for _, seconds in arrivals) or [0.0]
        records = [one for one in self._caplog.get_records("call") if self._is_warning(one)]
        log = [f"log after {one.created - self._since:.1f} s: {one.getMessage()}" for one in records]
        texts = [*self._findings, *((one.created, one.getMessage()) for one in records)]
        named = [at - self._since for at, text in texts if re.search(cause, text)]
        return Outcome(
            run,
            confirmed=len(confirmed),
            arrived=len(times),
            twice=sum(times.values()) - len(times),
            lost=len(confirmed - times.keys()),
            early=sum(seconds < 0 for seconds in late),
            late=" / ".join(f"{late[int(part * (len(late) - 1))]:.1f}" for part in (0.5, 0.99, 1)),
            silence=f"{sender.silence():.1f}",
            named=round(min(named), 1) if named else None,
            notes=[f"    {note[:240]}" for note in (*self._notes, *log[:3], *(f"send(): {e}" for e in sender.errors))],
        )

    def _is_warning(self, record: logging.LogRecord) -> bool:
        ours = record.name.startswith("airflow_delayed") and record.levelno >= logging.WARNING
        return ours and record.created >= self._since
