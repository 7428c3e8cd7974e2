"""SqsDelayHook: an Airflow connection of type ``aws`` as a transport for delayed messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from airflow.sdk import BaseHook

from airflow_delayed.compat import limits
from airflow_delayed.delivery import Clock, TopologyReport, check_type
from airflow_delayed.errors import MissingExtra, TransportUnavailable
from airflow_delayed.message import utcnow

try:
    from airflow.providers.amazon.aws.hooks.sqs import SqsHook
    from botocore.config import Config
except ModuleNotFoundError:
    raise MissingExtra("Amazon SQS", "apache-airflow-providers-amazon", "sqs") from None

from airflow_delayed.sqs.client import name_queues, retries, translated
from airflow_delayed.sqs.settings import QueueSettings
from airflow_delayed.sqs.transport import SqsTransport

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

#: With which a connection is tested: an answer in a few seconds.
_TEST = Config(connect_timeout=3, read_timeout=4, retries={"total_max_attempts": 1})


class SqsDelayHook(SqsTransport, BaseHook):
    """Delayed messages through Amazon SQS, in the way of NServiceBus.AmazonSQS.

    Up to 900 s SQS itself holds a message back in its destination. Beyond, with ``unrestricted_delay``, it waits in
    ``<destination>-delay.fifo``, and a FifoCycleSensor has to send it on. Delays are whole seconds, rounded up; at
    least once, so a consumer recognises duplicates by the message id. A destination is the name of a standard queue, or
    its URL or ARN if it is in the connection's own account.

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
        super().__init__(
            conn_id,
            self._make_client,
            self._extra,
            envelope=envelope,
            clock=clock,
            sleep=sleep,
        )

    @property
    def clock(self) -> Clock:
        """The clock that returns the present."""
        return self._clock

    def verify(
        self,
        destinations: Iterable[str],
        *,
        max_delay: timedelta | None = None,
        settings: QueueSettings | None = None,
    ) -> TopologyReport:
        """Compare as the transport does; also report the features that this version of Airflow lacks."""
        report = super().verify(destinations, max_delay=max_delay, settings=settings)
        return TopologyReport((*report.findings, *limits()))

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
            check_type(self.conn_id, self.get_connection(self.conn_id).conn_type, self.conn_type)
        with translated(self.conn_id, "make a client"):
            # a sixth of a request's CPU time goes into checks of what this package has checked or made itself
            own = Config(parameter_validation=False).merge(more or Config())
            config = Config(retries=retries()).merge(self._aws.config).merge(own)
            client = cast("SQSClient", self._aws.get_client_type(self._aws.region_name, config))
        name_queues(client)
        return client
