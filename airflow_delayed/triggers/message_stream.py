"""What the triggers for AssetWatchers share: their parameters, an event of several messages, and the pause after it."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from airflow.exceptions import AirflowOptionalProviderFeatureException
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_delayed import compat
from airflow_delayed.compat import NeedsAirflow
from airflow_delayed.errors import one_line, some
from airflow_delayed.triggers.base import class_path

try:
    from airflow.triggers.shared_stream import AdvanceItem, AdvanceOutcome, SharedStreamProducer
except ModuleNotFoundError as error:
    raise AirflowOptionalProviderFeatureException(
        "to watch a queue needs Airflow 3.3 or later: before, Airflow could not tell when an event is stored, and"
        " a message would be lost if the triggerer died just then"
    ) from error

#: Seconds from the moment that an event is stored to the next one, by default and at most.
EVENT_PAUSE = 5.0
MAX_PAUSE = 60.0
#: Bytes of the largest body in an event, by default and at most.
BODY_LIMIT = 65_536
MAX_BODY_LIMIT = 1_048_576

Message = TypeVar("Message")
log = logging.getLogger(__name__)


class Batch(list[Message]):
    """Messages that come in one event.

    Airflow counts a subscriber that leaves while it has a batch as if it had accepted it. So a subscriber notes that it
    has made the event; without that note nobody has the event, and the messages must come again.
    """

    has_event = False


class MessageStreamTrigger(BaseEventTrigger, Generic[Message]):
    """The base of triggers that make events of the messages in one queue.

    The parameters are those of the subclasses, whose further ones are attributes of the same names.
    """

    #: The defaults of the parameters beside connection and queue.
    defaults: ClassVar[Mapping[str, Any]] = {
        "pause": EVENT_PAUSE,
        "body": False,
        "body_limit": BODY_LIMIT,
        "triggerer_queue": None,
    }

    def __init__(
        self, conn_id: str, queue: str, *, pause: float, body: bool, body_limit: int, triggerer_queue: str | None
    ) -> None:
        if triggerer_queue is not None and not compat.TRIGGERER_QUEUES:
            raise NeedsAirflow("triggerer_queue=", "3.4", "leave it out, and run a triggerer without --queues")
        options = {} if triggerer_queue is None else {"queue": triggerer_queue}
        super().__init__(**options)  # type: ignore[no-untyped-call]
        if not conn_id or not queue:
            raise ValueError("conn_id and queue must not be empty")
        if not 0 <= pause <= MAX_PAUSE:
            raise ValueError(f"pause={pause} must be 0 to {MAX_PAUSE:.0f} seconds")
        if not 0 <= body_limit <= MAX_BODY_LIMIT:
            raise ValueError(f"body_limit={body_limit} must be 0 to {MAX_BODY_LIMIT} bytes")
        self.conn_id = conn_id
        # from 3.4 on the attribute "queue" is Airflow's: the queue of triggerers
        self.queue_name = queue
        self.triggerer_queue = triggerer_queue
        self.pause = pause
        self.body = body
        self.body_limit = body_limit

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class's path and its arguments.

        Arguments with their default are left out: so a later release with more arguments changes no watcher, for
        Airflow and for a triggerer with an earlier release.
        """
        arguments: dict[str, Any] = {"conn_id": self.conn_id, "queue": self.queue_name}
        values = {name: getattr(self, name) for name in self.defaults}
        arguments.update((name, value) for name, value in values.items() if value != self.defaults[name])
        return class_path(type(self)), arguments

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Batch[Message]]) -> AsyncIterator[TriggerEvent]:
        """Yield an event for the messages that came together."""
        async for batch in shared_stream:
            batch.has_event = True
            yield MessageEvent(
                payload={"queue": self.queue_name, "messages": [self._payload(found) for found in batch]}
            )

    @abstractmethod
    def _payload(self, message: Message) -> dict[str, Any]:
        """Return a message's part of the event."""

    def _log_long_body(self, message_id: object, size: int) -> None:
        log.warning(
            "message %s of queue %r: its body of %s bytes is beyond body_limit=%s, and not in the event",
            one_line(str(message_id)),
            self.queue_name,
            f"{size:,}",
            f"{self.body_limit:,}",
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Raise an error: Airflow reports only to a shared stream that it has stored an event.

        :raises NotImplementedError: always.
        """
        raise NotImplementedError(f"{type(self).__name__} is for an AssetWatcher; a task cannot be deferred to it")
        yield


class MessageEvent(TriggerEvent):
    """An event that shows ids alone when it is logged, as Airflow does with each."""

    def __repr__(self) -> str:
        """Return the queue and the ids."""
        ids = [str(message["message_id"]) for message in self.payload["messages"]]
        return f"MessageEvent<{len(ids)} of queue {self.payload['queue']!r}: {some(ids, separator=', ')}>"

    __str__ = __repr__


class MessageProducer(SharedStreamProducer, Generic[Message]):
    """A queue's end of a stream: hands messages out, and settles them when Airflow has stored their events.

    :param pause: seconds from the moment that an event is stored to the next one.
    """

    def __init__(self, *, pause: float) -> None:
        self._pause = pause
        self._settled = asyncio.Event()

    async def open_stream(self) -> AsyncIterator[tuple[Batch[Message], Batch[Message]]]:
        """Yield messages as they come, without end; the next ones after a pause."""
        async for messages in self.batches():
            self._settled.clear()
            batch = Batch(messages)
            yield batch, batch
            await self._settled.wait()
            await asyncio.sleep(self._pause)

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Settle messages whose events every subscriber has stored, was refused, or could not store."""
        for messages, outcome in batch:
            await self.settle(messages, outcome)
        self._settled.set()

    @abstractmethod
    def batches(self) -> AsyncIterator[Sequence[Message]]:
        """Yield messages as they come, without end. Each batch is settled before the next one is asked for."""

    @abstractmethod
    async def settle(self, messages: Batch[Message], outcome: AdvanceOutcome) -> None:
        """Let the queue forget messages, or hand them out again."""
