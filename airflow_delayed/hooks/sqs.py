"""SqsDelayHook: an Airflow connection of type ``aws`` as a transport for delayed messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from airflow.providers.amazon.aws.hooks.sqs import SqsHook
from airflow.sdk import BaseHook
from botocore.config import Config
from botocore.exceptions import ClientError

from airflow_delayed.compat import limits
from airflow_delayed.delivery import Clock, State, TopologyReport
from airflow_delayed.errors import LimitExceeded, TransportUnavailable
from airflow_delayed.message import utcnow
from airflow_delayed.sqs import cost, queues, visibility
from airflow_delayed.sqs.access import name_queues
from airflow_delayed.sqs.aside import ERROR_QUEUE, ERROR_SUFFIX
from airflow_delayed.sqs.counts import Counts
from airflow_delayed.sqs.cycle import DestinationGone, FifoCycle
from airflow_delayed.sqs.faults import is_missing, translated
from airflow_delayed.sqs.keeper import Keeper
from airflow_delayed.sqs.life import Life
from airflow_delayed.sqs.redrive import Redriven
from airflow_delayed.sqs.rounds import never
from airflow_delayed.sqs.settings import Duration, QueueSettings
from airflow_delayed.sqs.topology import Mode
from airflow_delayed.sqs.transport import SqsTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from mypy_boto3_sqs import SQSClient

log = logging.getLogger(__name__)

#: With which a connection is tested: an answer in a few seconds.
_TEST = Config(connect_timeout=3, read_timeout=4, retries={"total_max_attempts": 1})


class SqsDelayHook(SqsTransport, BaseHook):
    """Delayed messages through Amazon SQS, in the way of NServiceBus.AmazonSQS.

    Up to 900 s SQS itself holds a message back in its destination. Beyond, with ``unrestricted_delay``, it waits in
    ``<destination>-delay.fifo``, and a FifoCycleSensor has to send it on. Delays are whole seconds, rounded up; at
    least once, so a consumer recognises duplicates by the message id. A destination is the name of a standard queue.

    ``unrestricted_delay`` is off unless the connection's extra turns it on, as in NServiceBus's documentation, and for
    the same reasons: both sides have to know of it, each message costs 12 requests an hour (1.2 in full batches) while
    it waits, and is lost after 14 days where nobody runs the sensor. A store (``store_conn_id=``) needs none of that.

    :param conn_id: a connection of type ``aws``; its extra may hold ``queue_name_prefix`` and ``unrestricted_delay``
        (true or false) besides what the amazon provider reads (``region_name``, ``endpoint_url``, ``role_arn``, ...).
    :param envelope: "raw": the body as it is and the headers as attributes; for NServiceBus endpoints "nservicebus",
        its envelope around both, or "nservicebus-unwrapped", all headers in one attribute. By default the connection's
        extra ``envelope`` says it, and else it is "raw". All are read by ``airflow_delayed.sqs.entries.decode``.
    :param clock: what is taken for the present when a delay is computed.
    :param sleep: pauses before messages that failed are sent again.
    """

    conn_name_attr = "conn_id"
    default_conn_name = "aws_default"
    conn_type = "aws"
    hook_name = "Amazon SQS (delayed delivery)"

    def __init__(
        self,
        conn_id: str = default_conn_name,
        *,
        envelope: str | None = None,
        clock: Clock = utcnow,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(conn_id, self._make_client, self._extra, envelope=envelope, clock=clock, sleep=sleep)
        self._cycles: dict[tuple[str, str], FifoCycle] = {}

    @property
    def clock(self) -> Clock:
        """What is taken for the present."""
        return self._clock

    def verify(
        self,
        destinations: Iterable[str],
        *,
        max_delay: timedelta | None = None,
        settings: QueueSettings | None = None,
    ) -> TopologyReport:
        """Compare as the transport does, and tell what this version of Airflow lacks."""
        report = super().verify(destinations, max_delay=max_delay, settings=settings)
        return TopologyReport((*report.findings, *limits()))

    def cycle(
        self,
        destination: str,
        wait_seconds: int = 0,
        *,
        error_queue: str | None = None,
        stop: Callable[[], bool] = never,
    ) -> Counts:
        """Send on, once, whatever is visible in a destination's delay queue.

        :param wait_seconds: how long to wait for the first message: 0 to 20.
        :param error_queue: the name of the standard queue for messages that do not say when they are due, by default
            ``<destination>-error``; it is made when the first such message comes.
        :param stop: asked before each batch.
        :raises TopologyError: the delay queue or the destination does not exist.
        :raises TransportUnavailable: SQS cannot be reached or refuses the connection. Nothing is lost.
        """
        cycle = self._cycle(destination, error_queue)
        with self._asking(f"cycle {cycle.fifo_url}", destination):
            try:
                return cycle.run(wait_seconds, stop)
            except DestinationGone:
                raise self._directory.missing(destination) from None

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
        cycle = self._cycle(destination)
        with self._asking(f"count {cycle.fifo_url}", destination):
            return cycle.depth()

    def life(self, destination: str) -> Life:
        """Return how many messages to a destination wait, are delayed, in flight, and dead-lettered.

        :raises TopologyError: the destination does not exist.
        :raises TransportUnavailable: SQS cannot be reached or refuses the connection.
        """
        return self._keeper.life(destination)

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
        whole = visibility.checked_seconds(seconds, received_at=received_at, now=self._clock())
        url, name = self._directory.wanted(destination), self._directory.name(destination)
        with self._asking(f"change how long messages of {name} stay hidden", destination, fifo=False):
            return visibility.change(self._client, url, receipt_handles, whole)

    def redrive(self, destination: str, *, by_sqs: bool = True) -> Redriven:
        """Move the messages that a destination's dead-letter queue took from it back.

        SQS does it in a task of its own where no other queue uses the dead-letter queue; elsewhere it is done here.
        Body and attributes stay, so ``NServiceBus.MessageId`` does too; to SQS they are new messages. Run here it may
        be stopped at any time: a message is sent before it is deleted, so it may be there twice, and never not at all.

        :param by_sqs: False: always here, for instance where the role may not start such a task.
        :raises TopologyError: the destination or its dead-letter queue does not exist.
        :raises TransportUnavailable: SQS cannot be reached or refuses the connection. Nothing is lost.
        """
        return self._keeper.redrive(destination, by_sqs=by_sqs)

    def estimate(self, delay: timedelta, messages: int = 1) -> cost.Estimate:
        """Return what it costs to delay so many messages, one way and another, without asking SQS.

        :raises ValueError: one of them is negative.
        """
        return cost.estimate(delay, messages)

    def test_connection(self) -> tuple[bool, str]:
        """Ask SQS for one queue, once and for a few seconds; return whether it answered and what to show."""
        try:
            with translated(self.conn_id, "list queues"), closing(self._make_client(_TEST)) as client:
                client.list_queues(QueueNamePrefix=self._prefix, MaxResults=1)
                return True, f"SQS answers at {client.meta.endpoint_url}"
        except TransportUnavailable as error:
            return False, str(error)

    def get_conn(self) -> SQSClient:
        """Return the boto3 client; it is made once."""
        return self._client

    @cached_property
    def _aws(self) -> SqsHook:
        return SqsHook(aws_conn_id=self.conn_id)

    def _extra(self) -> Mapping[str, Any]:
        extra: Mapping[str, Any] = self._aws.conn_config.extra_config
        return extra

    def _make_client(self, more: Config | None = None) -> SQSClient:
        if self.conn_id != self.default_conn_name:
            # where it is not defined, the amazon provider would go on as whoever this machine happens to be
            self.get_connection(self.conn_id)
        with translated(self.conn_id, "make a client"):
            # a sixth of a request's CPU time goes into checks of what this package has checked or made itself
            config = self._aws.config.merge(Config(parameter_validation=False)).merge(more or Config())
            client = cast("SQSClient", self._aws.get_client_type(self._aws.region_name, config))
        name_queues(client)
        return client

    @cached_property
    def _keeper(self) -> Keeper:
        return Keeper(self.conn_id, self._client, self._queues, lambda: self._poster)

    def _forget(self) -> None:
        super()._forget()
        self.__dict__.pop("_keeper", None)
        self._cycles.clear()

    @contextmanager
    def _asking(self, doing: str, destination: str, *, fifo: bool = True) -> Iterator[None]:
        """Translate errors; that the queue is gone is one of its own."""
        with translated(self.conn_id, doing):
            try:
                yield
            except ClientError as error:
                if is_missing(error):
                    self._forget()
                    raise self._directory.missing(destination, fifo) from error
                raise

    def _cycle(self, destination: str, error_queue: str | None = None) -> FifoCycle:
        if destination.endswith(queues.FIFO):
            raise LimitExceeded(
                "destination",
                f"{destination!r} is a FIFO queue; name the standard queue that messages are delivered to",
            )
        error_queue = error_queue or f"{destination}{ERROR_SUFFIX}"
        if (destination, error_queue) in self._cycles:
            return self._cycles[destination, error_queue]
        fifo_url, destination_url = self._directory.wanted(destination, True), self._directory.wanted(destination)
        if error_queue.endswith(queues.FIFO):
            raise LimitExceeded("error_queue", f"{error_queue!r} is a FIFO queue; name a standard one")

        def error_url() -> str:
            if (url := self._directory.url(error_queue)) is None:
                name = self._directory.name(error_queue)
                with translated(self.conn_id, f"create queue {name}"):
                    self._client.create_queue(QueueName=name, Attributes=ERROR_QUEUE)
                log.warning("made queue %s, for messages that cannot be delivered", name)
                url = self._directory.wanted(error_queue)
            return url

        for finding in self._queues.delay_queue(destination, QueueSettings(), Mode()):
            if finding.state is not State.OK:
                # it goes on all the same: to stop would make messages late, or lose them
                log.warning("%s", finding)

        cycle = FifoCycle(self._client, self._poster, fifo_url, destination_url, error_url, self._clock)
        self._cycles[destination, error_queue] = cycle
        return cycle
