"""RabbitMQMessageTrigger: an asset event for each message that arrives in a queue, for an AssetWatcher."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Hashable, Sequence
from typing import Any

from airflow.exceptions import AirflowOptionalProviderFeatureException
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_delayed.rabbitmq.consumer import Consumer, Delivery
from airflow_delayed.rabbitmq.event import payload

try:
    from airflow.triggers.shared_stream import AdvanceItem, SharedStreamProducer
except ModuleNotFoundError as error:
    raise AirflowOptionalProviderFeatureException(
        "RabbitMQMessageTrigger needs Airflow 3.3 or later: before, Airflow could not tell when an event is stored, and"
        " a message would be lost if the triggerer died just then"
    ) from error

log = logging.getLogger(__name__)

#: Messages in hand at most. Each subscriber of a stream has room for 1024
#: (``[triggerer] shared_stream_subscriber_queue_size``), and is failed by Airflow if there are more.
PREFETCH = 100
MAX_PREFETCH = 500
#: Bytes of the largest body that an event takes along, unless told otherwise, and the most that may be told.
BODY_LIMIT = 65_536
MAX_BODY_LIMIT = 1_048_576


class RabbitMQMessageTrigger(BaseEventTrigger):
    """Watches a queue; each message that arrives becomes an event of the asset, and starts the DAGs that wait for it.

    A message sent with a delay arrives at its due time, never earlier, so the DAG starts then. It is acknowledged
    after Airflow has stored the event: if the triggerer dies between the two, the broker hands it over again. So an
    event may come twice; its ``message_id`` is the same. Use it as
    ``Asset("rabbitmq_orders", watchers=[AssetWatcher(name="orders", trigger=RabbitMQMessageTrigger(...))])``. The
    event's ``extra["payload"]`` is that of :func:`airflow_delayed.rabbitmq.event.payload`: id, queue, destination, due
    time and size, and no header's value.

    All that watch one queue by one connection share one stream of messages in a triggerer; for each of several
    triggerers to see the same messages they have to be given alike. Never raises for a broker that cannot be reached
    or a queue that is missing: it tries on, every 30 seconds in the end, and says why in the triggerer's log.

    Needs Airflow 3.3 or later.

    :param conn_id: a connection of type ``rabbitmq``, ``amqp`` or ``amqps``; its user needs the right to read.
    :param queue: its name. Nobody else should consume from it: each message is handed to one consumer.
    :param prefetch: how many messages may be under way to Airflow's database, 1 to 500; of several that watch one
        queue, that of the first counts.
    :param body: take the body along. It is then in Airflow's database, in the UI, and open to all who may see assets.
    :param body_limit: of a larger body, in bytes, only the size is told; up to 1,048,576. The message is gone then.
    :raises ValueError: a parameter is not one of those above.
    """

    def __init__(
        self,
        conn_id: str,
        queue: str,
        prefetch: int = PREFETCH,
        body: bool = False,
        body_limit: int = BODY_LIMIT,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if not conn_id or not queue:
            raise ValueError("conn_id and queue must not be empty")
        if not 1 <= prefetch <= MAX_PREFETCH:
            raise ValueError(f"prefetch={prefetch} must be 1 to {MAX_PREFETCH}")
        if not 0 <= body_limit <= MAX_BODY_LIMIT:
            raise ValueError(f"body_limit={body_limit} must be 0 to {MAX_BODY_LIMIT} bytes")
        self.conn_id = conn_id
        self.queue = queue
        self.prefetch = prefetch
        self.body = body
        self.body_limit = body_limit

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class's path and its arguments.

        What is not given is left out: so watchers stay the same, for Airflow and for a triggerer of an earlier
        version, when there are more arguments.
        """
        arguments: dict[str, Any] = {"conn_id": self.conn_id, "queue": self.queue}
        defaults = {"prefetch": PREFETCH, "body": False, "body_limit": BODY_LIMIT}
        arguments.update((name, getattr(self, name)) for name in defaults if getattr(self, name) != defaults[name])
        return "airflow_delayed.triggers.rabbitmq_message.RabbitMQMessageTrigger", arguments

    def shared_stream_key(self) -> Hashable:
        """Return what those have in common that share a stream."""
        return "airflow_delayed.rabbitmq", self.conn_id, self.queue

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        """Return what consumes from the queue, for all that share the stream."""
        from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook

        hook = RabbitMQDelayHook(kwargs["conn_id"])
        return RabbitMQMessageProducer(hook.consumer(kwargs["queue"], prefetch=kwargs.get("prefetch", PREFETCH)))

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Delivery]) -> AsyncIterator[TriggerEvent]:
        """Yield an event for each message."""
        async for found in shared_stream:
            if self.body and len(found.body) > self.body_limit:
                log.warning(
                    "message %s of queue %r: its body of %s bytes is beyond body_limit=%s, and not in the event",
                    found.properties.message_id,
                    self.queue,
                    f"{len(found.body):,}",
                    f"{self.body_limit:,}",
                )
            limit = self.body_limit if self.body else None
            yield MessageEvent(
                payload=payload(
                    self.queue, found.properties, found.body, redelivered=found.redelivered, body_limit=limit
                )
            )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Raise an error: only with a shared stream does Airflow tell when an event is stored.

        :raises NotImplementedError: always.
        """
        raise NotImplementedError("RabbitMQMessageTrigger is for an AssetWatcher; a task cannot be deferred to it")
        yield


class MessageEvent(TriggerEvent):
    """An event that does not show its body when it is logged, as Airflow does with each."""

    def __repr__(self) -> str:
        """Return all but the body and its size."""
        shown = {name: value for name, value in self.payload.items() if not name.startswith("body")}
        return f"MessageEvent<{shown!r}>"

    __str__ = __repr__


class RabbitMQMessageProducer(SharedStreamProducer):
    """The broker's end of a stream: hands messages out, and acknowledges those whose events are stored."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    async def open_stream(self) -> AsyncIterator[tuple[Delivery, Delivery]]:
        """Yield each message, without end."""
        async for found in self._consumer.deliveries():
            yield found, found

    def get_advance_lane(self, broker_payload: Delivery) -> Hashable:
        """Have no message wait for another: each is acknowledged by itself."""
        return broker_payload

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Acknowledge what every subscriber has stored, refuse what one refused, and hand the rest out again."""
        for found, outcome in batch:
            if outcome.is_clean:
                self._consumer.done(found)
            elif outcome.rejected and not outcome.failed:
                self._consumer.reject(found)
            else:
                self._consumer.again(found)

    async def aclose(self) -> None:
        """Close the connection; what is not acknowledged goes back to the queue."""
        await self._consumer.close()
