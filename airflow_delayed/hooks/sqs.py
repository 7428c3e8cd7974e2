"""SqsDelayHook: an Airflow connection of type ``aws`` as a transport for delayed messages."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, cast

from airflow.providers.amazon.aws.hooks.sqs import SqsHook
from airflow.sdk import BaseHook
from botocore.config import Config
from botocore.exceptions import ClientError

from airflow_delayed.delivery import Clock, Finding, SendReport, State, TopologyReport
from airflow_delayed.errors import DestinationMissing, InputError, LimitExceeded, TopologyError, TransportUnavailable
from airflow_delayed.message import DelayedMessage, delay_seconds, utcnow
from airflow_delayed.sqs import queues
from airflow_delayed.sqs.counts import Counts
from airflow_delayed.sqs.cycle import ERROR_QUEUE, ERROR_SUFFIX, DestinationGone, FifoCycle
from airflow_delayed.sqs.entries import FORMS, RAW, pack
from airflow_delayed.sqs.faults import is_missing, translated
from airflow_delayed.sqs.hops import hop_of
from airflow_delayed.sqs.post import Poster
from airflow_delayed.sqs.rounds import never
from airflow_delayed.sqs.sender import Sender

if TYPE_CHECKING:
    from collections.abc import Callable

    from mypy_boto3_sqs import SQSClient

#: Extra of the connection: what every queue's name begins with, as NServiceBus's QueueNamePrefix.
PREFIX_EXTRA = "queue_name_prefix"
#: Extra of the connection: the form of what is sent, one of ``airflow_delayed.sqs.entries.FORMS``.
ENVELOPE_EXTRA = "envelope"
#: Time left between a dispatcher's hand-over and the limit of what SQS can delay.
MARGIN = timedelta(seconds=30)


class SqsDelayHook(BaseHook):
    """Delayed messages through Amazon SQS, in the way of NServiceBus.AmazonSQS.

    Up to 900 s SQS itself holds a message back in its destination. Beyond, it waits in ``<destination>-delay.fifo``,
    and a FifoCycleSensor has to send it on. Delays are whole seconds, rounded up; at least once, so a consumer
    recognises duplicates by the message id. A destination is the name of a standard queue.

    :param conn_id: a connection of type ``aws``; its extra may hold ``queue_name_prefix`` besides what the amazon
        provider reads (``region_name``, ``endpoint_url``, ``role_arn``, ...).
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
        super().__init__()
        self.conn_id = conn_id
        self._envelope = envelope
        self._clock = clock
        self._sleep = sleep
        self._urls: dict[tuple[str, bool], str] = {}
        self._cycles: dict[tuple[str, str], FifoCycle] = {}

    @property
    def clock(self) -> Clock:
        """What is taken for the present."""
        return self._clock

    @property
    def horizon(self) -> timedelta:
        """870 s: what SQS itself can delay, less a margin for the hand-over."""
        return timedelta(seconds=queues.MAX_DELAY) - MARGIN

    def install(
        self, destinations: Iterable[str], *, create_destinations: bool = False, dry_run: bool = False
    ) -> TopologyReport:
        """Make the delay queue of each destination, and with ``create_destinations`` the destination itself.

        :raises TopologyError: a setting differs or a destination is missing (not with ``dry_run``).
        """
        findings: list[Finding] = []
        for destination in dict.fromkeys(destinations):
            for fifo in (False, True):
                make = fifo or create_destinations
                found = self._compare(destination, fifo)
                if found[0].state is State.MISSING and make:
                    name = self._name(destination, fifo)
                    found = [
                        Finding(
                            state=State.PLANNED if dry_run else State.CREATED,
                            resource=queues.resource(name),
                            destination=destination,
                        )
                    ]
                    if not dry_run:
                        self._create(name, fifo)
                findings += found
        report = TopologyReport(tuple(findings))
        if not dry_run and not report.ok:
            raise TopologyError(self.conn_id, report)
        return report

    def verify(self, destinations: Iterable[str], *, max_delay: timedelta | None = None) -> TopologyReport:
        """Compare the queues with what is needed; delay queues only if some delay is over 900 s, or unknown."""
        findings: list[Finding] = []
        far = max_delay is None or max_delay > timedelta(seconds=queues.MAX_DELAY)
        for destination in dict.fromkeys(destinations):
            for fifo in (False, True) if far else (False,):
                findings += self._compare(destination, fifo)
        return TopologyReport(tuple(findings))

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Check a message as SQS would, without asking it.

        :raises LimitExceeded: the delay, the body, a header, the size or the queue's name is beyond what SQS takes.
        """
        hop = hop_of(delay_seconds(message.due_at, now))
        self._name(message.destination, hop.through_fifo)
        pack(message, self._form)

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Send messages in batches; what fails is sent again one by one.

        :raises LimitExceeded: SQS would refuse a message. Nothing was sent.
        :raises DestinationMissing: a destination's queue does not exist. Nothing was sent.
        :raises TopologyError: a delay queue does not exist. Nothing was sent.
        :raises SendFailed: some were not confirmed; or one of the above, after others were sent.
        :raises TransportUnavailable: SQS cannot be reached or refuses the connection.
        """
        return Sender(self.conn_id, self._poster, self._locate, self._clock, self._form).send(messages)

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
        with self._asking(f"cycle {cycle.fifo_url}", self._name(destination, True)):
            try:
                return cycle.run(wait_seconds, stop)
            except DestinationGone:
                raise self._missing(self._name(destination, False), destination) from None

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
        with self._asking(f"count {cycle.fifo_url}", self._name(destination, True)):
            return cycle.depth()

    def test_connection(self) -> tuple[bool, str]:
        """Ask SQS for one queue, and return whether it answered and what to show."""
        try:
            with translated(self.conn_id, "list queues"):
                self._client.list_queues(QueueNamePrefix=self._prefix, MaxResults=1)
        except TransportUnavailable as error:
            return False, str(error)
        return True, f"SQS answers at {self._client.meta.endpoint_url}"

    def get_conn(self) -> SQSClient:
        """Return the boto3 client; it is made once."""
        return self._client

    def close(self) -> None:
        """Close the client; the next use makes a new one."""
        if "_client" in self.__dict__:
            self._client.close()
            del self._client
        self.__dict__.pop("_poster", None)
        self._cycles.clear()
        self._urls.clear()

    @cached_property
    def _aws(self) -> SqsHook:
        return SqsHook(aws_conn_id=self.conn_id)

    @cached_property
    def _client(self) -> SQSClient:
        with translated(self.conn_id, "make a client"):
            # a sixth of a request's CPU time goes into checks of what this package has checked or made itself
            config = self._aws.config.merge(Config(parameter_validation=False))
            return cast("SQSClient", self._aws.get_client_type(self._aws.region_name, config))

    @cached_property
    def _poster(self) -> Poster:
        return Poster(self._client, self._sleep)

    @cached_property
    def _prefix(self) -> str:
        return str(self._aws.conn_config.extra_config.get(PREFIX_EXTRA, ""))

    @cached_property
    def _form(self) -> str:
        form = self._envelope or self._aws.conn_config.extra_config.get(ENVELOPE_EXTRA) or RAW
        if form not in FORMS:
            raise InputError(
                f"connection {self.conn_id!r}: {ENVELOPE_EXTRA}={form!r} is none of {', '.join(map(repr, FORMS))}"
            )
        return str(form)

    def _name(self, destination: str, fifo: bool) -> str:
        return (queues.delay_queue_name if fifo else queues.queue_name)(destination, self._prefix)

    def _url(self, destination: str, fifo: bool) -> str | None:
        """Return a queue's URL, asked for once, or None if there is no such queue."""
        if (destination, fifo) not in self._urls:
            name = self._name(destination, fifo)
            with translated(self.conn_id, f"look up queue {name}"):
                try:
                    self._urls[destination, fifo] = self._client.get_queue_url(QueueName=name)["QueueUrl"]
                except ClientError as error:
                    if not is_missing(error):
                        raise
                    return None
        return self._urls[destination, fifo]

    def _locate(self, destination: str, fifo: bool) -> str:
        if url := self._url(destination, fifo):
            return url
        if fifo:
            raise self._missing(self._name(destination, fifo), None)
        raise DestinationMissing(
            self.conn_id,
            [destination],
            "create the queue, or run TopologyInstallOperator(..., create_destinations=True)",
        )

    @contextmanager
    def _asking(self, doing: str, name: str) -> Iterator[None]:
        """Translate errors; that the delay queue is gone is one of its own."""
        with translated(self.conn_id, doing):
            try:
                yield
            except ClientError as error:
                if is_missing(error):
                    self._urls.clear()
                    self._cycles.clear()
                    raise self._missing(name, None) from error
                raise

    def _missing(self, name: str, destination: str | None) -> TopologyError:
        finding = Finding(state=State.MISSING, resource=queues.resource(name), destination=destination)
        return TopologyError(self.conn_id, TopologyReport((finding,)))

    def _cycle(self, destination: str, error_queue: str | None = None) -> FifoCycle:
        error_queue = error_queue or f"{destination}{ERROR_SUFFIX}"
        if (destination, error_queue) in self._cycles:
            return self._cycles[destination, error_queue]
        fifo_url, destination_url = self._url(destination, True), self._url(destination, False)
        if fifo_url is None:
            raise self._missing(self._name(destination, True), None)
        if destination_url is None:
            raise self._missing(self._name(destination, False), destination)
        if error_queue.endswith(queues.FIFO):
            raise LimitExceeded("error_queue", f"{error_queue!r} is a FIFO queue; name a standard one")

        def error_url() -> str:
            if (url := self._url(error_queue, False)) is None:
                name = self._name(error_queue, False)
                with translated(self.conn_id, f"create queue {name}"):
                    self._client.create_queue(QueueName=name, Attributes=ERROR_QUEUE)
                self.log.warning("made queue %s, for messages that cannot be delivered", name)
                url = self._locate(error_queue, False)
            return url

        cycle = FifoCycle(self._client, self._poster, fifo_url, destination_url, error_url, self._clock)
        self._cycles[destination, error_queue] = cycle
        return cycle

    def _compare(self, destination: str, fifo: bool) -> list[Finding]:
        name = self._name(destination, fifo)
        url = self._url(destination, fifo)
        # a delay queue that is missing does not make its destination a missing one
        missing = Finding(
            state=State.MISSING, resource=queues.resource(name), destination=None if fifo else destination
        )
        if url is None:
            return [missing]
        with translated(self.conn_id, f"read the settings of queue {name}"):
            try:
                found = self._client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
            except ClientError as error:
                if is_missing(error):
                    del self._urls[destination, fifo]
                    return [missing]
                raise
        compare = queues.compare_delay_queue if fifo else queues.compare_destination
        return compare(name, {str(key): value for key, value in found.items()}, destination)

    def _create(self, name: str, fifo: bool) -> None:
        attributes = queues.delay_queue_attributes() if fifo else queues.destination_attributes()
        with translated(self.conn_id, f"create queue {name}"):
            self._client.create_queue(QueueName=name, Attributes=attributes)  # type: ignore[arg-type]
