"""RabbitMQMessageTrigger: asset events for the messages that arrive in a queue, for an AssetWatcher."""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from airflow_delayed.rabbitmq.transport import require_client
from airflow_delayed.triggers.message_stream import (
    BODY_LIMIT,
    EVENT_PAUSE,
    Batch,
    MessageEvent,
    MessageProducer,
    MessageStreamTrigger,
)

require_client()
from airflow_delayed.rabbitmq.consumer import Consumer, ReceivedMessage, event_payload  # noqa: E402

if TYPE_CHECKING:
    from airflow.triggers.shared_stream import AdvanceOutcome

__all__ = ["MessageEvent", "RabbitMQMessageProducer", "RabbitMQMessageTrigger"]

#: Messages in hand at most. Each subscriber of a stream has room for 1024
#: (``[triggerer] shared_stream_subscriber_queue_size``), and is failed by Airflow if there are more.
PREFETCH = 100
MAX_PREFETCH = 500


class RabbitMQMessageTrigger(MessageStreamTrigger[ReceivedMessage]):
    """Watches a queue; messages that arrive become events of the asset, and start the DAGs that wait for it.

    A message sent with a delay arrives at its due time, never earlier, so the DAG starts then. It is acknowledged
    after Airflow has stored the event: if the triggerer dies between the two, the broker delivers it again. So a
    message may be in two events; its ``message_id`` is the same. Use it as
    ``Asset("orders", watchers=[AssetWatcher(name="queue", trigger=RabbitMQMessageTrigger(...))])``.

    An event's ``extra["payload"]`` has the ``queue`` and the ``messages`` that came together, each as
    :func:`airflow_delayed.rabbitmq.consumer.event_payload` has it: id, destination, due time, size, and no header's
    value.

    The first message after a quiet time makes an event at once; messages within ``pause`` after an event was stored
    make one event together when the pause ends. The reason: Airflow 3.3 starts no run for an event that it stores
    before the scheduler has seen the last one; such an event waits for the next one (apache/airflow#54659, fixed by
    #70972).

    Watchers of one queue with the same connection share one stream of messages in a triggerer; with several triggerers
    they see the same messages only if all their parameters are the same. While the broker cannot be reached, or the
    queue is missing, the trigger raises no error: it tries again, every 30 seconds in the end, and logs the reason.

    Needs Airflow 3.3 or later.

    :param conn_id: a connection of type ``rabbitmq``, ``amqp`` or ``amqps``; its user needs the right to read.
    :param queue: its name. It should have no other consumer: RabbitMQ delivers each message to one consumer only.
    :param prefetch: how many messages an event has at most, 1 to 500.
    :param pause: seconds from the moment that an event is stored to the next one, 0 to 60: more than your scheduler
        takes to make a run of it. If several triggers watch one queue, ``prefetch`` and ``pause`` of the first count.
    :param body: take the body along. It is then in Airflow's database, in the UI, and open to all who may see assets.
    :param body_limit: bytes, up to 1,048,576. Of a larger body the event has only the size; the message is acknowledged
        all the same, and its body lost.
    :param triggerer_queue: run it on triggerers that were started with ``--queues`` and this name, where
        ``[triggerer] queues_enabled`` is set; what Airflow calls a trigger's ``queue``. Needs Airflow 3.4.
    :raises ValueError: a parameter is not one of those above.
    :raises NeedsAirflow: ``triggerer_queue`` before Airflow 3.4.
    """

    defaults = {"prefetch": PREFETCH, **MessageStreamTrigger.defaults}

    def __init__(
        self,
        conn_id: str,
        queue: str,
        prefetch: int = PREFETCH,
        pause: float = EVENT_PAUSE,
        body: bool = False,
        body_limit: int = BODY_LIMIT,
        triggerer_queue: str | None = None,
    ) -> None:
        super().__init__(conn_id, queue, pause=pause, body=body, body_limit=body_limit, triggerer_queue=triggerer_queue)
        if not 1 <= prefetch <= MAX_PREFETCH:
            raise ValueError(f"prefetch={prefetch} must be 1 to {MAX_PREFETCH}")
        self.prefetch = prefetch

    def shared_stream_key(self) -> Hashable:
        """Return the key of the stream; triggers with the same key share it."""
        return "airflow_delayed.rabbitmq", self.conn_id, self.queue_name

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> RabbitMQMessageProducer:
        """Return the consumer of the queue, for all triggers that share the stream."""
        from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook

        hook = RabbitMQDelayHook(kwargs["conn_id"])
        consumer = hook.consumer(kwargs["queue"], prefetch=kwargs.get("prefetch", PREFETCH))
        return RabbitMQMessageProducer(consumer, pause=kwargs.get("pause", EVENT_PAUSE))

    def _payload(self, message: ReceivedMessage) -> dict[str, Any]:
        if self.body and message.size > self.body_limit:
            self._log_long_body(message.properties.message_id, message.size)
        limit = self.body_limit if self.body else None
        return event_payload(
            message.properties, message.body, redelivered=message.redelivered, body_limit=limit, size=message.size
        )


class RabbitMQMessageProducer(MessageProducer[ReceivedMessage]):
    """The broker's end of a stream: hands messages out, and acknowledges those whose events are stored.

    :param pause: seconds from the moment that an event is stored to the next one.
    """

    def __init__(self, consumer: Consumer, *, pause: float) -> None:
        super().__init__(pause=pause)
        self._consumer = consumer

    def batches(self) -> AsyncIterator[Sequence[ReceivedMessage]]:
        """Yield messages as they come, without end."""
        return self._consumer.batches()

    async def settle(self, messages: Batch[ReceivedMessage], outcome: AdvanceOutcome) -> None:
        """Acknowledge messages that every subscriber has stored, reject refused ones, and deliver the others again."""
        if outcome.is_clean and messages.has_event:
            settle = self._consumer.done
        elif outcome.rejected and not outcome.failed:
            settle = self._consumer.reject
        else:
            settle = self._consumer.again
        for message in messages:
            settle(message)

    async def aclose(self) -> None:
        """Close the connection; unacknowledged messages go back to the queue."""
        await self._consumer.close()
