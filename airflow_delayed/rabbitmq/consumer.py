"""Taking messages from one queue for as long as it is asked to, through whatever happens to the connection."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from random import random
from typing import TYPE_CHECKING

from airflow_delayed.backoff import next_sleep
from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.rabbitmq.hosts import host_name
from airflow_delayed.rabbitmq.link import Arrival, Link

if TYPE_CHECKING:
    from pika import BasicProperties
    from pika.connection import Parameters

log = logging.getLogger(__name__)

#: Seconds between two rounds of tries to connect, at first and at most.
_FIRST_SLEEP, _LONGEST_SLEEP = 1.0, 30.0
#: Seconds after which a connection was a good one, and the waits start over.
_GOOD = 60.0
#: Seconds after which a problem that stays the same is told again.
_TELL_AGAIN = 600.0
#: Seconds until a message that nobody has taken is handed out again.
_AGAIN = 1.0
#: Seconds for which others are waited for that come with a message, and bytes of bodies after which none are.
_TOGETHER = 0.1
_BATCH_BYTES = 1_048_576
#: Seconds to wait for the broker's farewell.
_CLOSING = 3.0
#: How many handled messages are remembered, in multiples of what may be under way.
_REMEMBERED = 10

#: By what a message is recognised when it comes again: its id, and a hash of its body.
_Key = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message that was handed out and waits to be settled, with :meth:`Consumer.done` or another."""

    arrival: Arrival
    key: _Key | None
    link: Link

    @property
    def properties(self) -> BasicProperties:
        """Its properties."""
        return self.arrival.properties

    @property
    def body(self) -> bytes | None:
        """Its body; None if that is longer than 1 MiB, for such bodies are not kept."""
        return self.arrival.body

    @property
    def size(self) -> int:
        """Bytes of its body."""
        return self.arrival.size

    @property
    def redelivered(self) -> bool:
        """Whether the broker had handed it over before."""
        return self.arrival.redelivered


class Consumer:
    """Hands out a queue's messages; each stays in the queue until it is :meth:`done`.

    A lost connection is opened again, at the first host that answers, without end. What was done while the broker
    could not be told of it, the broker hands over again: that is recognised by its message id, and not handed out.
    After the end of the process it is not.

    Of a body of more than 1 MiB only the size and a hash are kept when it arrives: what is held at once is at most
    ``prefetch`` MiB, however large the messages are.

    :param conn_id: names the connection in the log.
    :param hosts: returns the hosts to try; asked before each round, so that a changed connection is seen.
    :param prefetch: how many messages may be in hand at most.
    :param chance: returns a number from 0 to less than 1, which shortens the sleeps between two rounds of tries.
    """

    def __init__(
        self,
        conn_id: str,
        queue: str,
        hosts: Callable[[], Awaitable[Sequence[Parameters]]],
        *,
        prefetch: int,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random,
    ) -> None:
        self._conn_id = conn_id
        self._queue = queue
        self._hosts = hosts
        self._prefetch = prefetch
        self._monotonic = monotonic
        self._sleep = sleep
        self._chance = chance
        self._link: Link | None = None
        self._done: OrderedDict[_Key, None] = OrderedDict()
        self._told: tuple[str, float] | None = None

    async def batches(self) -> AsyncIterator[list[ReceivedMessage]]:
        """Yield messages as they come, those together that come together, without end.

        A batch has at most ``prefetch`` messages, and is closed once their bodies have 1,048,576 bytes. Each message of
        it has to be settled before the next one is asked for.
        """
        rounds = 0
        while True:
            link = await self._connect()
            if link is not None:
                log.info("connection %r: watching queue %r", self._conn_id, self._queue)
                self._told = None
                since = self._monotonic()
                taken = False
                while isinstance(found := await link.inbox.get(), Arrival):
                    taken = True
                    await self._sleep(_TOGETHER)
                    if batch := self._batch(link, found):
                        yield batch
                if taken or self._monotonic() - since >= _GOOD:
                    rounds = 0
                self._tell(found)
                await link.close(_CLOSING)
            rounds += 1
            await self._sleep(next_sleep(rounds, first=_FIRST_SLEEP, longest=_LONGEST_SLEEP, chance=self._chance))

    def done(self, delivery: ReceivedMessage) -> None:
        """Let the broker forget a message; at once, or when it hands it over again after a lost connection."""
        if delivery.key is not None:
            self._done[delivery.key] = None
            while len(self._done) > _REMEMBERED * self._prefetch:
                self._done.popitem(last=False)
        delivery.link.ack(delivery.arrival.tag)

    def reject(self, delivery: ReceivedMessage) -> None:
        """Refuse a message for good: it goes to the queue's dead-letter exchange, or is dropped if there is none."""
        delivery.link.reject(delivery.arrival.tag)

    def again(self, delivery: ReceivedMessage) -> None:
        """Hand a message out again, a second later.

        It is not returned to the queue: a quorum queue counts that, and lets a message go after the twentieth time.
        """
        found = replace(delivery.arrival, redelivered=True)
        # if the connection is lost by then nobody reads that inbox, and the broker hands the message over again
        asyncio.get_running_loop().call_later(_AGAIN, delivery.link.inbox.put_nowait, found)

    async def close(self) -> None:
        """Close the connection; what is not done goes back to the queue."""
        if self._link is not None:
            await self._link.close(_CLOSING)

    async def _connect(self) -> Link | None:
        """Try each host once; return None if none lets us consume."""
        causes = []
        try:
            hosts = await self._hosts()
        except Exception as error:
            # no connection of that name, a certificate that cannot be read: it may be mended while we wait
            self._tell(f"{type(error).__name__}: {error}")
            return None
        for host in hosts:
            self._link = Link(host, self._queue, self._prefetch)
            try:
                await self._link.opened
                return self._link
            except TransportUnavailable as error:
                causes.append(f"{host_name(host)}: {error}")
                await self._link.close(_CLOSING)
        self._tell("; ".join(causes))
        return None

    def _batch(self, link: Link, found: Arrival | str) -> list[ReceivedMessage]:
        """Return what is new of a message and those behind it."""
        batch: list[ReceivedMessage] = []
        size = 0
        while isinstance(found, Arrival):
            delivery = self._take(link, found)
            if delivery is not None:
                batch.append(delivery)
                size += delivery.size
            if link.inbox.empty() or len(batch) >= self._prefetch or size >= _BATCH_BYTES:
                return batch
            found = link.inbox.get_nowait()
        # why there will be no more, for who asks next
        link.inbox.put_nowait(found)
        return batch

    def _take(self, link: Link, found: Arrival) -> ReceivedMessage | None:
        """Return what to hand out; None for what is known already."""
        key = _key(found)
        # a message that is new to the broker is one, also if its sender had sent it before
        if found.redelivered and key in self._done:
            link.ack(found.tag)
            return None
        return ReceivedMessage(found, key, link)

    def _tell(self, problem: str) -> None:
        """Log a problem, and the same one again only after a while."""
        now = self._monotonic()
        if self._told is None or self._told[0] != problem or now - self._told[1] >= _TELL_AGAIN:
            self._told = problem, now
            log.warning("connection %r: cannot watch queue %r: %s. Trying on", self._conn_id, self._queue, problem)


def _key(found: Arrival) -> _Key | None:
    if not found.properties.message_id:
        return None
    return found.properties.message_id, found.digest
