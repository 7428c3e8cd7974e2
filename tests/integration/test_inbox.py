"""A consumer with an inbox, as docs/start/consumers.md has it, does no work twice and loses none, whenever it dies."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing

import pika
import pytest
from support import consuming
from support.forked import PATIENCE, Child
from support.lengths import length
from support.rabbitmq import VirtualHost
from support.stores import DATABASES, Store

#: On each database.
KILLS = length("kills of a consumer with an inbox", 4, 100)
#: Messages from one kill to the next, each of them twice.
BATCH = 60


def until(ready: Callable[[], bool]) -> None:
    """Wait, and look so often that little happens in between."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.002)


@pytest.mark.parametrize("store", DATABASES, indirect=True)
def test_killed_again_and_again_it_does_no_work_twice(store: Store, vhost: VirtualHost, request, tmp_path):
    name = request.node.callspec.params["store"]
    url = str(tmp_path / "consumer.db") if name == "sqlite" else request.getfixturevalue(f"{name}_url")
    vhost.declare("reminders")
    rng = random.Random(KILLS)
    ids: list[str] = []
    with ExitStack() as stack:
        database = stack.enter_context(closing(consuming.connected(url, store.schema)))
        consuming.tables(database)
        channel = stack.enter_context(vhost.channel())

        def done() -> int:
            cursor = database.cursor()
            cursor.execute("SELECT COUNT(*) FROM inbox")
            (count,) = cursor.fetchone()
            database.rollback()
            return count

        def begin() -> Child:
            arguments = {"url": url, "schema": store.schema, "broker": vhost.parameters}
            return stack.enter_context(closing(Child(consuming.consume, **arguments)))

        consumers = [begin(), begin()]
        for number in range(KILLS):
            batch = [f"{number}.{each}" for each in range(BATCH)]
            for each in (*batch, *rng.sample(batch, BATCH)):
                channel.basic_publish("", "reminders", each.encode(), pika.BasicProperties(message_id=each))
            before = len(ids)
            ids += batch
            # in the middle of the batch; of two, each dies in turn
            middle = before + rng.randrange(1, BATCH // 2)
            until(lambda middle=middle: done() >= middle)
            time.sleep(rng.uniform(0, 0.01))
            consumers[number % 2].kill()
            consumers[number % 2] = begin()
        until(lambda: done() == len(ids))
        while True:
            vhost.until(reminders=0)
            for each in consumers:
                each.kill()
            # then what was not acknowledged is in the queue again
            until(lambda: channel.queue_declare("reminders", passive=True).method.consumer_count == 0)
            if channel.queue_declare("reminders", passive=True).method.message_count == 0:
                break
            consumers = [begin(), begin()]
        cursor = database.cursor()
        cursor.execute("SELECT text FROM reminded")
        work = Counter(text for (text,) in cursor.fetchall())
        database.rollback()
    assert work == dict.fromkeys(ids, 1)


@pytest.mark.parametrize("store", DATABASES, indirect=True)
def test_work_that_fails_is_done_when_the_message_comes_again(store: Store, request, tmp_path):
    name = request.node.callspec.params["store"]
    url = str(tmp_path / "consumer.db") if name == "sqlite" else request.getfixturevalue(f"{name}_url")
    with closing(consuming.connected(url, store.schema)) as database:
        consuming.tables(database)
        names: dict[str, object] = {}
        exec(consuming.code("def once(", database), names)
        once, mark = names["once"], "?" if name == "sqlite" else "%s"

        def remind(cursor) -> None:
            cursor.execute(f"INSERT INTO reminded VALUES ({mark})", ["tea"])

        def fail(cursor) -> None:
            remind(cursor)
            raise RuntimeError("no tea")

        with pytest.raises(RuntimeError):
            once(database, "a", fail)
        # as the end of the process does
        database.rollback()
        # an id is its characters, upper and lower case
        for message_id in ("a", "A", "a", "A"):
            once(database, message_id, remind)
        with pytest.raises(ValueError, match="without an id"):
            once(database, None, remind)
        cursor = database.cursor()
        cursor.execute("SELECT COUNT(*) FROM reminded")
        assert cursor.fetchone() == (2,)
        database.rollback()
