"""What an ``aws`` connection sends through: its queues by name, what they take, and the sender. No Airflow here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow_delayed.delivery import Clock, SendReport, TopologyReport
from airflow_delayed.errors import DestinationMissing, InputError, LimitExceeded, TopologyError
from airflow_delayed.message import DelayedMessage, delay_seconds
from airflow_delayed.sqs import queues
from airflow_delayed.sqs.directory import Directory
from airflow_delayed.sqs.entries import FORMS, RAW, pack
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


class Outlet:
    """Sends through one connection.

    :param client: returns the client; asked when it is first needed.
    :param extra: the connection's extra.
    :param envelope: the form of what is sent, in place of what the extra says.
    :param sleep: pauses before messages that failed are sent again.
    """

    def __init__(
        self,
        conn_id: str,
        client: Callable[[], SQSClient],
        extra: Mapping[str, Any],
        *,
        envelope: str | None = None,
        clock: Clock,
        sleep: Callable[[float], None],
    ) -> None:
        self._conn_id = conn_id
        self._client = client
        self._extra = extra
        self._envelope = envelope
        self._clock = clock
        self._sleep = sleep
        #: Destinations whose delay queues are as demanded.
        self._verified: set[str] = set()
        #: Bytes of the largest message that can pass through the delay queue into the destination.
        self._largest: dict[str, int] = {}

    @cached_property
    def unrestricted_delay(self) -> bool:
        """Whether messages due in over 900 s may wait in delay queues.

        :raises InputError: the connection's extra is neither true nor false.
        """
        given = self._extra.get(UNRESTRICTED_EXTRA, False)
        if str(given).lower() not in ("true", "false"):
            raise InputError(
                f"connection {self._conn_id!r} has {UNRESTRICTED_EXTRA}={given!r} in its extra; use true or false"
            )
        return str(given).lower() == "true"

    @cached_property
    def prefix(self) -> str:
        """What every queue's name begins with."""
        return str(self._extra.get(PREFIX_EXTRA, ""))

    @cached_property
    def poster(self) -> Poster:
        """Posts batches."""
        return Poster(self._client(), self._sleep)

    @cached_property
    def directory(self) -> Directory:
        """The queues by name."""
        return Directory(self._conn_id, self._client(), self.prefix)

    @cached_property
    def queues(self) -> Queues:
        """What the queues are like."""
        return Queues(self._conn_id, self._client(), self.directory)

    @cached_property
    def _form(self) -> str:
        form = self._envelope or self._extra.get(ENVELOPE_EXTRA) or RAW
        if form not in FORMS:
            raise InputError(
                f"connection {self._conn_id!r}: {ENVELOPE_EXTRA}={form!r} is none of {', '.join(map(repr, FORMS))}"
            )
        return str(form)

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Check a message as SQS would, without asking it.

        :raises LimitExceeded: the delay, the body, a header, the size or the queue's name is beyond what SQS takes.
        """
        hop = hop_of(delay_seconds(message.due_at, now))
        if hop.through_fifo:
            self.allow_far()
        # its client is not needed for a name, and might not be had
        (queues.delay_queue_name if hop.through_fifo else queues.queue_name)(message.destination, self.prefix)
        pack(message, self._form)

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Send messages in batches, see :meth:`airflow_delayed.sqs.sender.Sender.send`.

        :param messages: where they are a list or tuple, delays of over 900 s are checked before the first is sent.
        """
        if isinstance(messages, list | tuple):
            now = self._clock()
            for message in messages:
                if delay_seconds(message.due_at, now) > queues.MAX_DELAY:
                    self.allow_far()
                    self.locate(message.destination, False)
                    self.locate(message.destination, True)
        return Sender(
            self._conn_id, self.poster, self.locate, self._clock, self._form, largest=self._largest.__getitem__
        ).send(messages)

    def locate(self, destination: str, fifo: bool) -> str:
        """Return the URL of a destination, or of its delay queue.

        :raises DestinationMissing: the destination does not exist.
        :raises TopologyError: the delay queue does not exist, or is not as demanded.
        """
        if fifo and destination not in self._verified:
            self.allow_far()
            # what waits in a queue that is not as demanded may be lost
            report = TopologyReport(tuple(self.queues.delay_queue(destination, QueueSettings(), Mode())))
            if not report.ok:
                raise TopologyError(self._conn_id, report)
            self._verified.add(destination)
            self._largest[destination] = self.queues.largest(destination)
        if fifo:
            return self.directory.wanted(destination, fifo)
        if url := self.directory.url(destination):
            return url
        raise DestinationMissing(
            self._conn_id,
            [destination],
            "create the queue, or run TopologyInstallOperator(..., create_destinations=True)",
        )

    def allow_far(self) -> None:
        """Check that messages may wait in delay queues.

        :raises LimitExceeded: they may not.
        """
        if not self.unrestricted_delay:
            raise LimitExceeded(
                "due_at",
                f"is over {queues.MAX_DELAY} s away, and no message waits for that long through connection"
                f" {self._conn_id!r}; {INSTEAD}",
            )

    def forget(self) -> None:
        """Forget what is known of the queues."""
        self.__dict__.pop("directory", None)
        self.__dict__.pop("queues", None)
        self._verified.clear()
