"""Amazon SQS as a transport: made from a plain connection here, or with the client of Airflow's hook."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow_delayed.delivery import Clock, Connection, Delivery, Finding, SendReport, State, TopologyReport
from airflow_delayed.errors import DestinationMissing, InputError, LimitExceeded, TopologyError
from airflow_delayed.lineage import Dataset, sqs_queue
from airflow_delayed.message import DelayedMessage, delay_seconds
from airflow_delayed.sqs import cost, queues
from airflow_delayed.sqs.access import name_queues
from airflow_delayed.sqs.directory import Directory
from airflow_delayed.sqs.entries import FORMS, RAW, pack
from airflow_delayed.sqs.faults import translated
from airflow_delayed.sqs.hops import hop_of
from airflow_delayed.sqs.post import Poster
from airflow_delayed.sqs.sender import Sender
from airflow_delayed.sqs.settings import QueueSettings
from airflow_delayed.sqs.topology import Mode, Queues

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

#: Extra of the connection: what every queue's name begins with, as NServiceBus's QueueNamePrefix.
PREFIX_EXTRA = "queue_name_prefix"
#: Extra of the connection: whether messages due in over 900 s may wait in delay queues.
UNRESTRICTED_EXTRA = "unrestricted_delay"
#: Extra of the connection: the form of what is sent, one of ``airflow_delayed.sqs.entries.FORMS``.
ENVELOPE_EXTRA = "envelope"
#: How long SQS itself can delay, less a margin of half a minute for a dispatcher's hand-over.
HORIZON = timedelta(seconds=queues.MAX_DELAY - 30)
#: What to do about a delay that is over what SQS itself has.
INSTEAD = (
    "let such messages wait in a store (store_conn_id=), or the task that sends them (lead=), or set"
    f' "{UNRESTRICTED_EXTRA}": true in its extra and run TopologyInstallOperator and a FifoCycleSensor'
)
#: Extras of Airflow's aws connections by which a role is taken on; an executor has one of its own.
_ROLES = ("role_arn", "assume_role_method", "assume_role_kwargs")
_SESSION = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token", "region_name", "profile_name")


class SqsTransport(Delivery):
    """Sends through one connection.

    :param conn_id: names the connection in errors.
    :param client: makes the client; called when one is first needed.
    :param extra: returns the connection's extra.
    :param envelope: the form of what is sent, in place of what the extra says.
    :param sleep: pauses before messages that failed are sent again.
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
            connection.conn_id, lambda: _client(connection), lambda: connection.extra, envelope=envelope, clock=clock
        )

    @property
    def horizon(self) -> timedelta:
        """870 s: what SQS itself can delay, less a margin for the hand-over."""
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

        :param settings: what destinations shall be like; those that are made, and those that are there.
        :param repair: change what differs. Each finding says what that does to messages that are there already.
            SQS takes up to a minute for it, and up to 15 for a retention.
        :raises TopologyError: a setting differs or a destination is missing (not with ``dry_run``).
        :raises LimitExceeded: a destination is a FIFO queue, or its name is too long.
        :raises AccessDenied: the connection's role may not do something; nothing is undone.
        """
        mode = Mode(make_delay_queues=True, make_others=create_destinations, repair=repair, dry_run=dry_run)
        findings = self._queues.install(destinations, settings or QueueSettings(), mode, far=self.unrestricted_delay)
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
        """Compare the queues with what is needed; delay queues only if some delay is over 900 s, or unknown.

        Warns of a destination whose backlog and retention could let a message expire unread.

        :param settings: what destinations shall be like; without it they must keep messages for half an hour.
        """
        far = max_delay is None or max_delay > timedelta(seconds=queues.MAX_DELAY)
        findings = self._queues.install(
            destinations, settings or QueueSettings(), Mode(), far=far and self.unrestricted_delay
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
        """Send messages in batches; what fails is sent again one by one.

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
        return Sender(
            self.conn_id, self._poster, self._locate, self._clock, self._form, largest=self._largest.__getitem__
        ).send(messages)

    def advice(self, messages: int, delays: timedelta) -> str | None:
        """Return what to tell of messages that are due beyond the horizon: what they cost, and what is cheaper."""
        return cost.advice(messages, delays)

    def dataset(self, destination: str, *, fifo: bool = False) -> Dataset:
        """Return OpenLineage's name of a destination's queue, or of its delay queue.

        :raises TopologyError: there is no such queue.
        """
        meta = self._client.meta
        return sqs_queue(meta.partition, meta.region_name, self._directory.wanted(destination, fifo))

    def close(self) -> None:
        """Close the client; the next use makes a new one."""
        if "_client" in self.__dict__:
            self._client.close()
            del self._client
        self._forget()
        self.__dict__.pop("_poster", None)
        self._largest.clear()

    @cached_property
    def _client(self) -> SQSClient:
        return self._new_client()

    @cached_property
    def _prefix(self) -> str:
        return str(self._extra_of().get(PREFIX_EXTRA, ""))

    @cached_property
    def _poster(self) -> Poster:
        return Poster(self._client, self._sleep)

    @cached_property
    def _directory(self) -> Directory:
        return Directory(self.conn_id, self._client, self._prefix)

    @cached_property
    def _queues(self) -> Queues:
        return Queues(self.conn_id, self._client, self._directory)

    @cached_property
    def _form(self) -> str:
        form = self._envelope or self._extra_of().get(ENVELOPE_EXTRA) or RAW
        if form not in FORMS:
            raise InputError(
                f"connection {self.conn_id!r}: {ENVELOPE_EXTRA}={form!r} is none of {', '.join(map(repr, FORMS))}"
            )
        return str(form)

    def _locate(self, destination: str, fifo: bool) -> str:
        """Return the URL of a destination, or of its delay queue.

        :raises DestinationMissing: the destination does not exist.
        :raises TopologyError: the delay queue does not exist, or is not as demanded.
        """
        if fifo and destination not in self._verified:
            self._allow_far()
            # what waits in a queue that is not as demanded may be lost
            report = TopologyReport(tuple(self._queues.delay_queue(destination, QueueSettings(), Mode())))
            if not report.ok:
                raise TopologyError(self.conn_id, report)
            self._verified.add(destination)
            self._largest[destination] = self._queues.largest(destination)
        if fifo:
            return self._directory.wanted(destination, fifo)
        if url := self._directory.url(destination):
            return url
        raise DestinationMissing(
            self.conn_id,
            [destination],
            "create the queue, or run TopologyInstallOperator(..., create_destinations=True)",
        )

    def _allow_far(self) -> None:
        """Check that messages may wait in delay queues.

        :raises LimitExceeded: they may not.
        """
        if not self.unrestricted_delay:
            raise LimitExceeded(
                "due_at",
                f"is over {queues.MAX_DELAY} s away, and no message waits for that long through connection"
                f" {self.conn_id!r}; {INSTEAD}",
            )

    def _forget(self) -> None:
        """Forget what is known of the queues."""
        self.__dict__.pop("_directory", None)
        self.__dict__.pop("_queues", None)
        self._verified.clear()


def _client(connection: Connection) -> SQSClient:
    from boto3.session import Session
    from botocore.config import Config

    extra = connection.extra
    session = {name: extra[name] for name in _SESSION if extra.get(name)}
    if connection.login and connection.password:
        session |= {"aws_access_key_id": connection.login, "aws_secret_access_key": connection.password}
    service = (extra.get("service_config") or {}).get("sqs") or {}
    config = Config(**{"parameter_validation": False, **(extra.get("config_kwargs") or {})})
    with translated(connection.conn_id, "make a client"):
        client: SQSClient = Session(**session).client(
            "sqs",
            endpoint_url=service.get("endpoint_url") or extra.get("endpoint_url"),
            verify=extra.get("verify"),
            config=config,
        )
    name_queues(client)
    return client
