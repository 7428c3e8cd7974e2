"""The two processes of store_lateness.py: one stores, one dispatches.

    store_stay.py feed URL COUNT RATE
    store_stay.py stay URL COUNT nothing|rabbitmq

They say when they are ready, and begin at a sign.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from datetime import datetime, timedelta
from operator import length_hint

from store_worker import BODY, BROKER, QUEUE, NoBroker, hook, wait_for_start

from airflow_delayed.delivery import DelayedDelivery, SendReport, delivery_for
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.triggers import store_dispatch
from airflow_delayed.triggers.store_dispatch import StoreDispatchTrigger

#: Messages a transaction.
TOGETHER = 10
#: Seconds until the dispatcher gives up.
PATIENCE = 120.0


class Watched:
    """A transport that notes how late each message is given to it, in milliseconds."""

    def __init__(self, inner: DelayedDelivery) -> None:
        self._inner = inner
        self.horizon = inner.horizon
        self.check = inner.check
        self.close = inner.close
        self.kept_open = inner.kept_open
        self.service = inner.service
        self.late: list[float] = []

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        return self._inner.send(Noted(messages, self.late))


class Noted:
    """The messages given to a transport, noting how late it takes each."""

    def __init__(self, messages: Iterable[DelayedMessage], late: list[float]) -> None:
        self._messages = messages
        self._late = late

    def __length_hint__(self) -> int:
        return length_hint(self._messages)

    def __iter__(self) -> Iterator[DelayedMessage]:
        for message in self._messages:
            self._late.append((utcnow() - message.due_at).total_seconds() * 1000)
            yield message


def feed(url: str, count: int, rate: int) -> None:
    chance = random.Random(0)
    with closing(hook(url)) as store:
        install(store)
        wait_for_start()
        start = time.time()
        for number in range(0, count, TOGETHER):
            time.sleep(max(0.0, start + number / rate - time.time()))
            some = range(number, min(number + TOGETHER, count))
            dues = [utcnow() + timedelta(seconds=chance.uniform(1, 3)) for _ in some]
            store.send(
                DelayedMessage(destination=QUEUE, body=BODY, due_at=due, message_id=f"order-{one:08d}")
                for one, due in zip(some, dues, strict=True)
            )


def stay(url: str, count: int, kind: str) -> None:
    made: list[Watched] = []

    def watched(conn_id: str, clock: Callable[[], datetime]) -> DelayedDelivery:
        made.append(Watched((delivery_for if kind == "rabbitmq" else NoBroker)(conn_id, clock)))
        return made[-1]

    with closing(hook(url)) as store:
        install(store)
        wait_for_start()
        asyncio.run(dispatch(store, watched, lambda: sum(len(one.late) for one in made) >= count))
    print(json.dumps([late for one in made for late in one.late]))


async def dispatch(
    store: DelayedStoreHook,
    transports: Callable[[str, Callable[[], datetime]], DelayedDelivery],
    enough: Callable[[], bool],
) -> None:
    """Run the trigger, as the triggerer does, until it is enough."""
    store_dispatch.delivery_for = transports
    end = utcnow() + timedelta(seconds=PATIENCE)
    policy = DispatchPolicy(lookahead=timedelta(0))
    trigger = StoreDispatchTrigger(store.conn_id, [BROKER], until=end.isoformat(), policy=policy.state())

    async def run() -> None:
        async for event in trigger.run():
            raise SystemExit(f"the trigger fired: {event.payload}")

    work = asyncio.ensure_future(run())
    while not enough() and not work.done():
        await asyncio.sleep(0.1)
    work.cancel()
    with suppress(asyncio.CancelledError):
        await work


def install(store: DelayedStoreHook) -> None:
    """Both do; the second finds it done."""
    store.install([])


if __name__ == "__main__":
    action, url, count, last = sys.argv[1:]
    if action == "feed":
        feed(url, int(count), int(last))
    else:
        stay(url, int(count), last)
