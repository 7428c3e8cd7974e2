"""ReplySensor: waits for the reply to a message, in the triggerer, and goes on with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator, XComArg

from airflow_delayed.compat import AirflowFailException, AirflowSensorTimeout, KeepsTexts
from airflow_delayed.delivery import Clock, delivery_for
from airflow_delayed.errors import InputError, one_line
from airflow_delayed.message import check_id, parse_moment, utcnow
from airflow_delayed.replies import Reply, ReplyQueue
from airflow_delayed.triggers.reply import ReplyTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context


class ReplySensor(KeepsTexts, BaseSensorOperator):
    """Waits without a worker for the reply to one message, and passes it to a function of yours on a worker.

    A reply names the message that it answers: in ``NServiceBus.RelatedTo`` or ``NServiceBus.CorrelationId``, as
    NServiceBus's endpoints do, or in AMQP's property ``correlation_id``. Many tasks of many runs may wait in one queue,
    each for its own reply. A reply may come before its task waits. Replies to other messages stay where they are.

    The reply is removed when the function has returned; until then a retry reads it again, so the function may be
    called twice with one reply. Airflow's database and logs get the ids, and what the function returns as the task's
    XCom: it should not return a body that must stay secret.

    On RabbitMQ a waiting task has a queue ``<reply_to>.reply.<message_id>``, into which its reply is moved. See
    docs/dotnet.md for the rights, and for replies that nobody waits for.

    Which:

    :param conn_id: a connection to RabbitMQ, or to a SQL database whose queue table has the replies.
    :param reply_to: the queue in which replies come in, as ``airflow_delayed.nservicebus.headers(reply_to=...)`` has
        it. (``queue`` is Airflow's own: where an executor runs the task.)
    :param message_id: the id of the message that was sent, such as
        ``"{{ ti.xcom_pull('send')['message_ids'][0] }}"``. One task waits for an id at a time.
    :param on_reply: called with an :class:`airflow_delayed.replies.Reply`; what it returns is the task's result. If it
        raises, the task fails, and the reply stays.
    :param schema: of a queue table; by default the connection's own.

    When:

    :param timeout: how long it waits until it fails, without a retry: a timedelta or seconds, counted in each try; by
        default ``[sensors] default_timeout``, seven days. The message's own delay is part of it.

    Result:

    :raises AirflowSensorTimeout: no reply came in time; with ``soft_fail=True`` the task is skipped.
    :raises AirflowFailException: ``message_id`` can be the id of no message.
    :raises DelayedError: the connection has no queues of replies, or the queue does not exist.
    """

    template_fields: Sequence[str] = ("conn_id", "reply_to", "message_id")
    #: The present; a test sets another.
    clock: Clock = staticmethod(utcnow)
    ui_color = "#e8f1fb"

    def __init__(
        self,
        *,
        conn_id: str,
        reply_to: str,
        message_id: str | XComArg,
        on_reply: Callable[[Reply], Any],
        schema: str | None = None,
        timeout: timedelta | float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(timeout=timeout, **kwargs)
        self.conn_id = conn_id
        self.reply_to = reply_to
        self.message_id = message_id
        self.on_reply = on_reply
        self.schema = schema

    def execute(self, context: Context) -> Any:
        """Wait in the triggerer, unless the reply is there."""
        try:
            check_id(self.message_id)
        except InputError as error:
            raise AirflowFailException(f"{error}; message_id= must be the id of the message that was sent") from error
        return self._go_on(self.clock() + timedelta(seconds=self.timeout))

    def execute_complete(self, context: Context, event: dict[str, str | None], until: str) -> Any:
        """Read the reply and handle it; wait on if another process has taken it."""
        return self._go_on(parse_moment("until", until), event["reply"])

    def _go_on(self, until: datetime, key: str | None = None) -> Any:
        message_id = str(self.message_id)
        with self._replies() as replies:
            key = replies.collected(message_id) if key is None else key
            reply = None if key is None else replies.read(message_id, key)
        if reply is None and self.clock() >= until:
            raise AirflowSensorTimeout(self._late())
        if reply is None or key is None:
            self.defer(
                trigger=ReplyTrigger(self.conn_id, self.reply_to, message_id, until, self.schema),
                method_name="execute_complete",
                kwargs={"until": until.isoformat()},
            )
        own_id = one_line(reply.message_id or "without an id")
        self.log.info("reply %s to message %s: %s bytes", own_id, message_id, f"{len(reply.body):,}")
        # it may take hours: no connection is open meanwhile
        result = self.on_reply(reply)
        with self._replies() as replies:
            replies.remove(message_id, key)
        return result

    @contextmanager
    def _replies(self) -> Iterator[ReplyQueue]:
        replies = delivery_for(self.conn_id, schema=self.schema).replies(self.reply_to)
        try:
            yield replies
        finally:
            replies.close()

    def _late(self) -> str:
        return (
            f"no reply to message {self.message_id} came into queue {self.reply_to!r} within"
            f" {timedelta(seconds=self.timeout)}. Look whether the message was handled (an NServiceBus endpoint moves"
            " it to its error queue if not), whether its header NServiceBus.ReplyToAddress names this queue, and"
            " whether the reply has the message's id in NServiceBus.RelatedTo, NServiceBus.CorrelationId or the"
            " property correlation_id. If an earlier try handled the reply and was lost before Airflow knew, the reply"
            " is removed: mark the task as success. Else clear the task, and it waits again: a reply that comes later"
            " stays in the queue"
        )
