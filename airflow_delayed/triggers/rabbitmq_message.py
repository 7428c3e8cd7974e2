"""RabbitMQMessageTrigger: asset events for the messages that arrive in a queue, for an AssetWatcher."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Hashable, Sequence
from typing import Any

from airflow.exceptions import AirflowOptionalProviderFeatureException
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_delayed import compat
from airflow_delayed.compat import NeedsAirflow
from airflow_delayed.errors import one_line, some
from airflow_delayed.rabbitmq.consumer import Consumer, ReceivedMessage
from airflow_delayed.rabbitmq.event import told
from airflow_delayed.rabbitmq.link import KEPT_BODY

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
#: Seconds from the moment that an event is stored to the next one, unless told otherwise; and the most.
PAUSE = 5.0
MAX_PAUSE = 60.0
#: Bytes of the largest body that an event takes along, unless told otherwise, and the most that may be told.
BODY_LIMIT = 65_536
MAX_BODY_LIMIT = KEPT_BODY


class RabbitMQMessageTrigger(BaseEventTrigger):
    """Watches a queue; messages that arrive become events of the asset, and start the DAGs that wait for it.

    A message sent with a delay arrives at its due time, never earlier, so the DAG starts then. It is acknowledged
    after Airflow has stored the event: if the triggerer dies between the two, the broker hands it over again. So a
    message may be in two events; its ``message_id`` is the same. Use it as
    ``Asset("orders", watchers=[AssetWatcher(name="queue", trigger=RabbitMQMessageTrigger(...))])``.

    An event's ``extra["payload"]`` has the ``queue`` and the ``messages`` that came together, each as
    :func:`airflow_delayed.rabbitmq.event.told` has it: id, destination, due time, size, and no header's value.

    The first message after a while is told at once; those that come within ``pause`` after an event was stored are
    told together when it ends. For Airflow 3.3 makes no run of an event that it stores before the scheduler has seen
    the one before: such an event waits for the next one (apache/airflow#54659, mended by #70972).

    All that watch one queue by one connection share one stream of messages in a triggerer; for each of several
    triggerers to see the same messages they have to be given alike. Never raises for a broker that cannot be reached
    or a queue that is missing: it tries on, every 30 seconds in the end, and says why in the triggerer's log.

    Needs Airflow 3.3 or later.

    :param conn_id: a connection of type ``rabbitmq``, ``amqp`` or ``amqps``; its user needs the right to read.
    :param queue: its name. Nobody else should consume from it: each message is handed to one consumer.
    :param prefetch: how many messages an event has at most, 1 to 500.
    :param pause: seconds from the moment that an event is stored to the next one, 0 to 60: more than your scheduler
        takes to make a run of it. Of several that watch one queue, ``prefetch`` and ``pause`` of the first count.
    :param body: take the body along. It is then in Airflow's database, in the UI, and open to all who may see assets.
    :param body_limit: of a larger body, in bytes, only the size is told; up to 1,048,576. The message is gone then.
    :param triggerer_queue: run it on triggerers that were started with ``--queues`` and this name, where
        ``[triggerer] queues_enabled`` is set; what Airflow calls a trigger's ``queue``. Needs Airflow 3.4.
    :raises ValueError: a parameter is not one of those above.
    :raises NeedsAirflow: ``triggerer_queue`` before Airflow 3.4.
    """

    def __init__(
        self,
        conn_id: str,
        queue: str,
        prefetch: int = PREFETCH,
        pause: float = PAUSE,
        body: bool = False,
        body_limit: int = BODY_LIMIT,
        triggerer_queue: str | None = None,
    ) -> None:
        if triggerer_queue is not None and not compat.TRIGGERER_QUEUES:
            raise NeedsAirflow("triggerer_queue=", "3.4", "leave it out, and run a triggerer without --queues")
        options = {} if triggerer_queue is None else {"queue": triggerer_queue}
        super().__init__(**options)  # type: ignore[no-untyped-call]
        if not conn_id or not queue:
            raise ValueError("conn_id and queue must not be empty")
        if not 1 <= prefetch <= MAX_PREFETCH:
            raise ValueError(f"prefetch={prefetch} must be 1 to {MAX_PREFETCH}")
        if not 0 <= pause <= MAX_PAUSE:
            raise ValueError(f"pause={pause} must be 0 to {MAX_PAUSE:.0f} seconds")
        if not 0 <= body_limit <= MAX_BODY_LIMIT:
            raise ValueError(f"body_limit={body_limit} must be 0 to {MAX_BODY_LIMIT} bytes")
        self.conn_id = conn_id
        # from 3.4 on the attribute "queue" is Airflow's: the queue of triggerers
        self.queue_name = queue
        self.triggerer_queue = triggerer_queue
        self.prefetch = prefetch
        self.pause = pause
        self.body = body
        self.body_limit = body_limit

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class's path and its arguments.

        What is not given is left out: so watchers stay the same, for Airflow and for a triggerer of an earlier
        version, when there are more arguments.
        """
        arguments: dict[str, Any] = {"conn_id": self.conn_id, "queue": self.queue_name}
        defaults = {
            "prefetch": PREFETCH,
            "pause": PAUSE,
            "body": False,
            "body_limit": BODY_LIMIT,
            "triggerer_queue": None,
        }
        arguments.update((name, getattr(self, name)) for name in defaults if getattr(self, name) != defaults[name])
        return "airflow_delayed.triggers.rabbitmq_message.RabbitMQMessageTrigger", arguments

    def shared_stream_key(self) -> Hashable:
        """Return what those have in common that share a stream."""
        return "airflow_delayed.rabbitmq", self.conn_id, self.queue_name

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        """Return what consumes from the queue, for all that share the stream."""
        from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook

        hook = RabbitMQDelayHook(kwargs["conn_id"])
        consumer = hook.consumer(kwargs["queue"], prefetch=kwargs.get("prefetch", PREFETCH))
        return RabbitMQMessageProducer(consumer, pause=kwargs.get("pause", PAUSE))

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Batch]) -> AsyncIterator[TriggerEvent]:
        """Yield an event for the messages that came together."""
        async for batch in shared_stream:
            batch.has_event = True
            yield MessageEvent(payload={"queue": self.queue_name, "messages": [self._told(found) for found in batch]})

    def _told(self, found: ReceivedMessage) -> dict[str, Any]:
        if self.body and found.size > self.body_limit:
            log.warning(
                "message %s of queue %r: its body of %s bytes is beyond body_limit=%s, and not in the event",
                one_line(str(found.properties.message_id)),
                self.queue_name,
                f"{found.size:,}",
                f"{self.body_limit:,}",
            )
        limit = self.body_limit if self.body else None
        return told(found.properties, found.body, redelivered=found.redelivered, body_limit=limit, size=found.size)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Raise an error: only with a shared stream does Airflow tell when an event is stored.

        :raises NotImplementedError: always.
        """
        raise NotImplementedError("RabbitMQMessageTrigger is for an AssetWatcher; a task cannot be deferred to it")
        yield


class MessageEvent(TriggerEvent):
    """An event that shows ids alone when it is logged, as Airflow does with each."""

    def __repr__(self) -> str:
        """Return the queue and the ids."""
        ids = [str(message["message_id"]) for message in self.payload["messages"]]
        return f"MessageEvent<{len(ids)} of queue {self.payload['queue']!r}: {some(ids, separator=', ')}>"

    __str__ = __repr__


class Batch(list["ReceivedMessage"]):
    """Messages that come in one event.

    Airflow counts a subscriber that leaves while it has a batch as if it had accepted it. So a subscriber notes that it
    has made the event; without that note nobody has the event, and the messages must come again.
    """

    has_event = False


class RabbitMQMessageProducer(SharedStreamProducer):
    """The broker's end of a stream: hands messages out, and acknowledges those whose events are stored.

    :param pause: seconds from the moment that an event is stored to the next one.
    """

    def __init__(self, consumer: Consumer, *, pause: float) -> None:
        self._consumer = consumer
        self._pause = pause
        self._settled = asyncio.Event()

    async def open_stream(self) -> AsyncIterator[tuple[Batch, Batch]]:
        """Yield messages as they come, without end; the next ones after a pause."""
        async for messages in self._consumer.batches():
            self._settled.clear()
            batch = Batch(messages)
            yield batch, batch
            await self._settled.wait()
            await asyncio.sleep(self._pause)

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Acknowledge what every subscriber has stored, refuse what one refused, and hand the rest out again."""
        for messages, outcome in batch:
            if outcome.is_clean and messages.has_event:
                settle = self._consumer.done
            elif outcome.rejected and not outcome.failed:
                settle = self._consumer.reject
            else:
                settle = self._consumer.again
            for found in messages:
                settle(found)
        self._settled.set()

    async def aclose(self) -> None:
        """Close the connection; what is not acknowledged goes back to the queue."""
        await self._consumer.close()
