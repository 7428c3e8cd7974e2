"""Amazon SQS as a transport, with a client from a plain connection or from Airflow's hook."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from airflow_delayed.delivery import (
    Clock,
    Connection,
    Delivery,
    Finding,
    SendReport,
    State,
    TopologyReport,
)
from airflow_delayed.errors import DestinationMissing, InputError, LimitExceeded, TopologyError
from airflow_delayed.lineage import Dataset, sqs_queue
from airflow_delayed.message import DelayedMessage, delay_seconds
from airflow_delayed.nservicebus import warning_without_type
from airflow_delayed.sqs import admin, queues, stats
from airflow_delayed.sqs.admin import InstallMode, QueueAdmin, RedriveResult
from airflow_delayed.sqs.batch import BatchSender, MessageSender, change_visibility, visibility_seconds
from airflow_delayed.sqs.client import QueueUrls, is_missing, make_client, not_repeated, translated
from airflow_delayed.sqs.delay_queue import DelayQueue, DestinationGone, never
from airflow_delayed.sqs.entries import FORMS, RAW, pack
from airflow_delayed.sqs.hops import hop_of
from airflow_delayed.sqs.settings import Duration, QueueSettings
from airflow_delayed.sqs.stats import CycleCounts, QueueDepths

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

log = logging.getLogger(__name__)

#: Extra of the connection: what every queue's name begins with, as NServiceBus's QueueNamePrefix.
PREFIX_EXTRA = "queue_name_prefix"
#: Extra of the connection: whether messages due in over 900 s may wait in delay queues.
UNRESTRICTED_EXTRA = "unrestricted_delay"
#: Extra of the connection: the form of what is sent, one of ``airflow_delayed.sqs.entries.FORMS``.
ENVELOPE_EXTRA = "envelope"
#: How long SQS itself can delay, less half a minute for a dispatcher to send what it has claimed.
HORIZON = timedelta(seconds=queues.MAX_DELAY - 30)
#: The alternatives for a delay that is longer than SQS's own.
INSTEAD = (
    "let such messages wait in a store (store_conn_id=), or a DueTimeSensor in front of the task that sends them, or"
    f' set "{UNRESTRICTED_EXTRA}": true in its extra and run TopologyInstallOperator and a FifoCycleSensor'
)
#: Extras of Airflow's aws connections by which a role is taken on; an executor has one of its own.
_ROLES = ("role_arn", "assume_role_method", "assume_role_kwargs")


class SqsTransport(Delivery):
    """Sends messages through one connection, and looks after its queues.

    :param client: makes the client; called when one is first needed.
    :param extra: returns the connection's extra.
    :param envelope: the form of what is sent, in place of what the extra says.
    """

    def __init__(
        self,
        conn_id: str,
        client: Callable[[], SQSClient],
        extra: Callable[[], Mapping[str, Any]],
        *,
        envelope: str | None = None,
        clock: Clock,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__()
        self.conn_id = conn_id
        self._new_client = client
        self._extra_of = extra
        self._envelope = envelope
        self._clock = clock
        self._sleep = sleep
        #: Destinations whose delay queues are as demanded.
        self._verified: set[str] = set()
        #: Bytes of the largest message that can pass through the delay queue into the destination.
        self._largest: dict[str, int] = {}
        #: By destination and error queue.
        self._delay_queues: dict[tuple[str, str], DelayQueue] = {}

    @classmethod
    def of(cls, connection: Connection, *, clock: Clock, envelope: str | None = None) -> SqsTransport:
        """Return the transport of a plain connection.

        What the connection does not say, boto3 finds as ever: the environment, the machine's own role.

        :raises InputError: the connection takes on a role.
        """
        if taken := [name for name in _ROLES if connection.extra.get(name)]:
            raise InputError(
                f"connection {connection.conn_id!r}: the extra {taken[0]!r} takes on a role, which is not done here;"
                " give Spark's executors the role itself, or a connection with keys"
            )
        return cls(
            connection.conn_id,
            lambda: make_client(connection),
            lambda: connection.extra,
            envelope=envelope,
            clock=clock,
        )

    @property
    def horizon(self) -> timedelta:
        """870 s: the longest delay of SQS itself, less a margin for the dispatch."""
        return HORIZON

    @cached_property
    def unrestricted_delay(self) -> bool:
        """Whether messages due in over 900 s may wait in delay queues.

        :raises InputError: the connection's extra is neither true nor false.
        """
        given = self._extra_of().get(UNRESTRICTED_EXTRA, False)
        if str(given).lower() not in ("true", "false"):
            raise InputError(
                f"connection {self.conn_id!r} has {UNRESTRICTED_EXTRA}={given!r} in its extra; use true or false"
            )
        return str(given).lower() == "true"

    def install(
        self,
        destinations: Iterable[str],
        *,
        create_destinations: bool = False,
        dry_run: bool = False,
        settings: QueueSettings | None = None,
        repair: bool = False,
    ) -> TopologyReport:
        """Make the delay queue of each destination, and with ``create_destinations`` the destination itself.

        Delay queues are only for connections with ``unrestricted_delay``.

        :param settings: the settings of all destinations, new and existing.
        :param repair: change what differs. Each finding describes the effect on messages that are there already.
            SQS takes up to a minute for it, and up to 15 for a retention.
        :raises TopologyError: a setting differs or a destination is missing (not with ``dry_run``).
        :raises LimitExceeded: a destination is a FIFO queue, or its name is too long.
        :raises AccessDenied: the connection's role may not do something; nothing is undone.
        """
        mode = InstallMode(make_delay_queues=True, make_others=create_destinations, repair=repair, dry_run=dry_run)
        findings = self._admin.install(destinations, settings or QueueSettings(), mode, far=self.unrestricted_delay)
        report = TopologyReport(tuple(findings))
        if not dry_run and not report.ok:
            raise TopologyError(self.conn_id, report)
        return report

    def verify(
        self,
        destinations: Iterable[str],
        *,
        max_delay: timedelta | None = None,
        settings: QueueSettings | None = None,
    ) -> TopologyReport:
        """Compare the queues with their planned settings; delay queues only if a delay is over 900 s, or unknown.

        Warns of a destination whose backlog and retention could let a message expire unread.

        :param settings: what destinations shall be like; without it they must keep messages for half an hour.
        """
        far = max_delay is None or max_delay > timedelta(seconds=queues.MAX_DELAY)
        findings = self._admin.install(
            destinations, settings or QueueSettings(), InstallMode(), far=far and self.unrestricted_delay
        )
        if max_delay is not None and far and not self.unrestricted_delay:
            findings.append(
                Finding(
                    state=State.DIFFERS,
                    resource=f"connection {self.conn_id}",
                    argument=UNRESTRICTED_EXTRA,
                    wanted=True,
                    found=False,
                    why=f"a message is due in {max_delay}, and SQS itself delays by {queues.MAX_DELAY} s; {INSTEAD}",
                )
            )
        return TopologyReport(tuple(findings))

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Check a message as SQS would, without asking it.

        :raises LimitExceeded: the delay, the body, a header, the size or the queue's name is beyond what SQS takes.
        """
        hop = hop_of(delay_seconds(message.due_at, now))
        if hop.through_fifo:
            self._allow_far()
        # its client is not needed for a name, and might not be had
        (queues.delay_queue_name if hop.through_fifo else queues.queue_name)(message.destination, self._prefix)
        pack(message, self._form)

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Send messages in batches; failed messages are sent again one by one.

        :param messages: where they are a list or tuple, delays of over 900 s are checked before the first is sent.
        :raises LimitExceeded: SQS would refuse a message, or it is due in over 900 s and the connection has no
            ``unrestricted_delay``. Nothing was sent.
        :raises DestinationMissing: a destination's queue does not exist. Nothing was sent.
        :raises TopologyError: a delay queue does not exist, or is not as demanded. Nothing was sent.
        :raises SendFailed: some were not confirmed; or one of the above, after others were sent.
        :raises TransportUnavailable: SQS cannot be reached or refuses the connection.
        """
        if isinstance(messages, list | tuple):
            now = self._clock()
            for message in messages:
                if delay_seconds(message.due_at, now) > queues.MAX_DELAY:
                    self._allow_far()
                    self._locate(message.destination, False)
                    self._locate(message.destination, True)
        return MessageSender(
            self.conn_id, self._sender, self._locate, self._clock, self._form, largest=self._largest.__getitem__
        ).send(messages)

    def cycle(
        self,
        destination: str,
        wait_seconds: int = 0,
        *,
        error_queue: str | None = None,
        stop: Callable[[], bool] = never,
    ) -> CycleCounts:
        """Send on, once, the visible messages of a destination's delay queue.

        :param wait_seconds: how long to wait for the first message: 0 to 20.
        :param error_queue: the name of the standard queue for messages that do not say when they are due, by default
            ``<destination>-error``; it is made when the first such message comes.
        :param stop: asked before each batch.
        :raises TopologyError: the delay queue or the destination does not exist.
        :raises TransportUnavailable: SQS cannot be reached or refuses the connection. Nothing is lost.
        """
        queue = self._delay_queue(destination, error_queue)
        with self._asking(f"cycle {queue.fifo_url}", destination):
            try:
                return queue.run(wait_seconds, stop)
            except DestinationGone:
                raise self._urls.missing(destination) from None

    def waiting(self, destination: str) -> int:
        """Return about how many messages a destination's delay queue holds, visible or not.

        :raises TopologyError: the delay queue or the destination does not exist.
        :raises TransportUnavailable: SQS cannot be reached or refuses the connection.
        """
        return self._depth(destination)[0]

    def retention(self, destination: str) -> int:
        """Return the seconds after which a destination's delay queue forgets a message; raises as ``waiting``."""
        return self._depth(destination)[1]

    def _depth(self, destination: str) -> tuple[int, int]:
        queue = self._delay_queue(destination)
        with self._asking(f"count {queue.fifo_url}", destination):
            return queue.depth()

    def life(self, destination: str) -> QueueDepths:
        """Return how many messages to a destination wait, are delayed, in flight, and dead-lettered.

        :raises TopologyError: the destination does not exist.
        :raises TransportUnavailable: SQS cannot be reached or refuses the connection.
        """
        return self._admin.depths(destination)

    def extend_visibility(
        self,
        destination: str,
        receipt_handles: Sequence[str],
        seconds: Duration,
        *,
        received_at: datetime | None = None,
    ) -> dict[str, str]:
        """Keep received messages hidden from other consumers for ``seconds`` from now; 0 gives them back at once.

        :param seconds: a timedelta or whole seconds, at most 12 hours.
        :param received_at: when they were received; with it the 12 hours are counted from there, as SQS does.
        :return: the receipt handles that SQS refused, each with the reason; empty if none.
        :raises ValueError: it would be more than 12 hours in all. Nothing was changed.
        :raises TopologyError: the destination does not exist.
        :raises TransportUnavailable: SQS cannot be reached or refuses the connection.
        """
        whole = visibility_seconds(seconds, received_at=received_at, now=self._clock())
        url, name = self._urls.existing(destination), self._urls.name(destination)
        with self._asking(f"change how long messages of {name} stay hidden", destination, fifo=False):
            return change_visibility(self._client, url, dict.fromkeys(receipt_handles, whole))

    def redrive(self, destination: str, *, by_sqs: bool = True) -> RedriveResult:
        """Move the messages that a destination's dead-letter queue took from it back.

        SQS does it in a task of its own where no other queue uses the dead-letter queue; elsewhere it is done here.
        Body and attributes stay, so ``NServiceBus.MessageId`` does too; to SQS they are new messages. Run here it may
        be stopped at any time: a message is sent before it is deleted, so it may be there twice, and never not at all.

        :param by_sqs: False: always here, for instance where the role may not start such a task.
        :raises TopologyError: the destination or its dead-letter queue does not exist.
        :raises TransportUnavailable: SQS cannot be reached or refuses the connection. Nothing is lost.
        """
        return admin.redrive(self._admin, self._sender, destination, by_sqs=by_sqs)

    @staticmethod
    def estimate(delay: timedelta, *, price: float) -> float:
        """Return what a message costs in the delay queue for so long, by NServiceBus's formula.

        :param price: of one request to a FIFO queue.
        :raises ValueError: the delay is negative.
        """
        return stats.estimate(delay, price=price)

    def advice(self, messages: int, delays: timedelta) -> str | None:
        """Return a line for the log about messages due beyond the horizon: their requests, and a way with fewer."""
        return stats.advice(messages, delays)

    def receiver_warning(self, message: DelayedMessage) -> str | None:
        """Return a line for the log about a message without a type, in a form of NServiceBus."""
        return None if self._form == RAW else warning_without_type(message)

    def dataset(self, destination: str, *, fifo: bool = False) -> Dataset:
        """Return OpenLineage's name of a destination's queue, or of its delay queue.

        :raises TopologyError: there is no such queue.
        """
        meta = self._client.meta
        return sqs_queue(meta.partition, meta.region_name, self._urls.existing(destination, fifo))

    def close(self) -> None:
        """Close the client; the next use makes a new one."""
        if "_client" in self.__dict__:
            self._client.close()
            del self._client
        self._forget()
        self.__dict__.pop("_sender", None)
        self._largest.clear()

    @cached_property
    def _client(self) -> SQSClient:
        client = self._new_client()
        if not self.patient:
            not_repeated(client)
        return client

    @cached_property
    def _prefix(self) -> str:
        return str(self._extra_of().get(PREFIX_EXTRA, ""))

    @cached_property
    def _sender(self) -> BatchSender:
        return BatchSender(self._client, self._sleep, patient=self.patient)

    @cached_property
    def _admin(self) -> QueueAdmin:
        return QueueAdmin(self.conn_id, self._client, QueueUrls(self.conn_id, self._client, self._prefix))

    @property
    def _urls(self) -> QueueUrls:
        return self._admin.urls

    @cached_property
    def _form(self) -> str:
        form = self._envelope or self._extra_of().get(ENVELOPE_EXTRA) or RAW
        if form not in FORMS:
            raise InputError(
                f"connection {self.conn_id!r}: {ENVELOPE_EXTRA}={form!r} is none of {', '.join(map(repr, FORMS))}"
            )
        return str(form)

    def _locate(self, destination: str, fifo: bool) -> str:
        """Return the URL of a destination, or of its delay queue."""
        if fifo and destination not in self._verified:
            self._allow_far()
            # what waits in a queue that is not as demanded may be lost
            report = TopologyReport(tuple(self._admin.delay_queue(destination, QueueSettings(), InstallMode())))
            if not report.ok:
                raise TopologyError(self.conn_id, report)
            self._verified.add(destination)
            self._largest[destination] = self._admin.largest(destination)
        if fifo:
            return self._urls.existing(destination, fifo)
        if url := self._urls.url(destination):
            return url
        foreign = self._urls.foreign(destination)
        remedy = foreign and f"its account and region are not the connection's: {foreign.remedy}"
        raise DestinationMissing(
            self.conn_id,
            [destination],
            remedy or "create the queue, or run TopologyInstallOperator(..., create_destinations=True)",
        )

    def _allow_far(self) -> None:
        if not self.unrestricted_delay:
            raise LimitExceeded(
                "due_at",
                f"is over {queues.MAX_DELAY} s away, and no message waits for that long through connection"
                f" {self.conn_id!r}; {INSTEAD}",
            )

    def _delay_queue(self, destination: str, error_queue: str | None = None) -> DelayQueue:
        """Return the delay queue of a destination, and warn where it is not as demanded."""
        if destination.endswith(queues.FIFO):
            raise LimitExceeded(
                "destination",
                f"{destination!r} is a FIFO queue; name the standard queue that messages are delivered to",
            )
        address = queues.queue_address(destination)
        errors = error_queue or f"{address.name if address else destination}{queues.ERROR_SUFFIX}"
        if (destination, errors) in self._delay_queues:
            return self._delay_queues[destination, errors]
        destination_url, fifo_url = self._urls.existing(destination), self._urls.existing(destination, True)
        if errors.endswith(queues.FIFO):
            raise LimitExceeded("error_queue", f"{errors!r} is a FIFO queue; name a standard one")
        admin = self._admin
        for finding in admin.delay_queue(destination, QueueSettings(), InstallMode()):
            if finding.state is not State.OK:
                # it goes on all the same: to stop would make messages late, or lose them
                log.warning("%s", finding)
        queue = DelayQueue(
            self._client, self._sender, fifo_url, destination_url, lambda: admin.error_queue(errors), self._clock
        )
        self._delay_queues[destination, errors] = queue
        return queue

    @contextmanager
    def _asking(self, doing: str, destination: str, *, fifo: bool = True) -> Iterator[None]:
        """Translate errors; that the queue does not exist is a TopologyError."""
        with translated(self.conn_id, doing):
            try:
                yield
            except ClientError as error:
                if is_missing(error):
                    self._forget()
                    raise self._urls.missing(destination, fifo) from error
                raise

    def _forget(self) -> None:
        self.__dict__.pop("_admin", None)
        self._verified.clear()
        self._delay_queues.clear()
