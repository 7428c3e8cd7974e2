"""QueueTableTrigger under Airflow's own manager of shared streams, with real databases."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timedelta
from random import Random
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from airflow.triggers.shared_stream import SharedStreamManager
from sqlalchemy import text
from support.lengths import length
from support.memory import peak
from support.proxy import Proxy, proxy
from support.stores import Store, message, quoted, run_sql
from support.watching import Triggerer, eventually, triggerer

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.queue_receiver import QueueRow, QueueTableReceiver
from airflow_delayed.store.queue_replies import QueueTableReplies
from airflow_delayed.triggers.queue_table import QueueTableTrigger
from services import pgbouncer

Connect = Callable[..., str]
RANDOM_ROWS = length("random rows of a queue table", 300, 10_000)
on_servers = pytest.mark.parametrize("store", ["postgres", "mariadb"], indirect=True)
on_postgres = pytest.mark.parametrize("store", ["postgres"], indirect=True)
on_sqlite = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


def watcher(store: Store, queue: str = "q", **options: Any) -> QueueTableTrigger:
    return QueueTableTrigger(
        **{"conn_id": store.conn_id, "queue": queue, "pause": 0, "schema": store.schema, **options}
    )


@pytest.fixture
def hook(store: Store) -> DelayedStoreHook:
    """A store with the queue table "q"."""
    return store.installed("q", deliver_conn_id=None)


def insert(store: Store, hook: DelayedStoreHook, *names: str, **fields: Any) -> None:
    """Have a dispatcher insert messages."""
    hook.send(message(name, hook.now(), **fields) for name in names)
    store.dispatcher(hook).run()


def test_rows_are_deleted_when_their_event_is_stored_and_not_before(store: Store, hook: DelayedStoreHook) -> None:
    async def first() -> None:
        async with triggerer(watcher(store)) as one:
            insert(store, hook, "a", "b")
            await one.until("a", "b")
            await eventually(lambda: store.rows(hook, "q") == [])
            one.hold.add(1)
            insert(store, hook, "c")
            await one.until("a", "b", "c")
            # rows may be inserted meanwhile, by others too
            insert(store, hook, "d")

    async def second() -> None:
        async with triggerer(watcher(store)) as one:
            await one.until("c", "d")

    asyncio.run(first())
    assert len(store.rows(hook, "q")) == 2
    asyncio.run(second())
    assert store.rows(hook, "q") == []


def test_an_event_has_the_body_only_if_asked_and_up_to_its_limit(store: Store, hook: DelayedStoreHook, caplog) -> None:
    bodies = {"text": b"gr\xc3\xbc\xc3\x9fe", "binary": b"\0\xff", "empty": b"", "long": b"top secret" * 10}
    for name, body in bodies.items():
        insert(store, hook, name, body=body, headers={"password": "hush"})

    async def watch(**options: Any) -> dict[str, dict[str, Any]]:
        one = Triggerer()
        one.hold.add(1)
        one.watch(1, watcher(store, **options))
        await eventually(lambda: len(one.received) == len(bodies))
        await one.stop()
        assert "grü" not in "".join(one.texts)
        return {found["message_id"]: found for _, found in one.received}

    plain = asyncio.run(watch())
    assert plain == {name: {"message_id": name, "body_bytes": len(body)} for name, body in bodies.items()}
    whole = asyncio.run(watch(body=True, body_limit=20))
    assert whole == {
        "text": {**plain["text"], "body": "grüße"},
        "binary": {**plain["binary"], "body_base64": "AP8="},
        "empty": {**plain["empty"], "body": ""},
        "long": plain["long"],
    }
    assert "message long of queue 'q': its body of 100 bytes is beyond body_limit=20" in caplog.text
    assert "secret" not in caplog.text


def test_an_event_is_bounded_in_rows_and_in_bytes(store: Store, hook: DelayedStoreHook) -> None:
    insert(store, hook, *(f"s{number}" for number in range(7)))
    insert(store, hook, *(f"w{number}" for number in range(7)), body=b"x" * 1_000_000)

    async def watch() -> list[int]:
        async with triggerer(watcher(store, batch_size=5, body=True, body_limit=1_048_576)) as one:
            await eventually(lambda: len(one.received) == 14 and store.rows(hook, "q") == [])
            return [int(text.split("<")[1].split()[0]) for text in one.texts]

    # four megabytes are complete
    assert asyncio.run(watch()) == [5, 5, 4]


@on_servers
def test_watchers_that_differ_divide_the_rows(store: Store, hook: DelayedStoreHook) -> None:
    names = [f"m{number:02}" for number in range(40)]

    async def watch() -> None:
        async with triggerer(watcher(store, batch_size=3), watcher(store, batch_size=4)) as one:
            await asyncio.to_thread(insert, store, hook, *names)
            await eventually(lambda: len(one.received) >= 40 and store.rows(hook, "q") == [])
            assert sorted(one.ids(1) + one.ids(2)) == names

    asyncio.run(watch())


@on_servers
def test_a_receiver_deletes_its_rows_while_another_has_locked_the_next(store: Store, hook: DelayedStoreHook) -> None:
    """A table this small would be read from end to end: two deletes would wait for each other, and rows come twice."""
    insert(store, hook, *"abcdefgh")

    def receiver() -> QueueTableReceiver:
        return QueueTableReceiver(store.conn_id, store.hook().engine, "q", schema=store.schema)

    with closing(receiver()) as first, closing(receiver()) as second:
        assert [row.message_id for one in (first, second) for row in one.receive(4)] == [*"abcdefgh"]
        first.done()
        assert first.all_deleted
        second.again()
        assert [row.message_id for row in first.receive(8)] == [*"efgh"]


@on_servers
def test_rows_that_expire_are_deleted_without_an_event(store: Store, hook: DelayedStoreHook, caplog) -> None:
    insert(store, hook, "gone", "stays", "kept")
    quoted = '{s}"q"'
    past, future = datetime(2020, 1, 1), hook.now().replace(tzinfo=None) + timedelta(days=1)
    for name, expires in (("gone", past), ("stays", future)):
        store.sql(hook, f"UPDATE {quoted} SET expires = '{expires:%Y-%m-%d}' WHERE headers LIKE '%{name}%'")
    caplog.set_level(logging.INFO)

    async def watch() -> None:
        async with triggerer(watcher(store)) as one:
            await one.until("stays", "kept")

    asyncio.run(watch())
    assert store.rows(hook, "q") == []
    assert "table 'q': 1 rows have expired" in caplog.text


@on_sqlite
def test_a_row_that_makes_no_sense_holds_up_no_other(store: Store, hook: DelayedStoreHook) -> None:
    insert(store, hook, "first", "second", "third")
    store.sql(hook, "UPDATE q SET headers = x'ff00', body = 'text', expires = 'never' WHERE headers LIKE '%first%'")
    store.sql(hook, "UPDATE q SET headers = '[1]', body = NULL, expires = 7 WHERE headers LIKE '%second%'")

    async def watch() -> None:
        async with triggerer(watcher(store, body=True)) as one:
            await eventually(lambda: len(one.received) == 3 and store.sql(hook, "SELECT seq FROM q") == [])
            assert [found for _, found in one.received] == [
                {"message_id": None, "body_bytes": 4, "body": "text"},
                {"message_id": None, "body_bytes": 0},
                {"message_id": "third", "body_bytes": 13, "body": "body of third"},
            ]

    asyncio.run(watch())


@on_postgres
def test_headers_of_any_length_take_no_memory(store: Store, hook: DelayedStoreHook) -> None:
    """Whoever may insert rows writes a hundred bytes of SQL, and the row stays when its reader is killed."""

    def inserted(lists: int) -> None:
        store.sql(
            hook,
            "INSERT INTO {s}q (id, headers, body) VALUES"
            f" (gen_random_uuid(), '[' || repeat('[],', {lists}) || '[]]', 'x')",
        )

    def received() -> list[QueueRow]:
        receiver = QueueTableReceiver(store.conn_id, store.hook().engine, "q", schema=store.schema)
        rows = receiver.receive(100)
        receiver.done()
        receiver.close()
        return rows

    inserted(5)
    small = peak(received)
    inserted(2_000_000)
    inserted(5)
    # six megabytes of JSON were 160 of Python's lists
    assert peak(received) < 3 * small
    inserted(2_000_000)
    inserted(5)
    assert [(row.message_id, row.size) for row in received()] == [(None, 1), (None, 1)]


#: What random rows are made of, beside random bytes and text.
PIECES = [b"{", b"}", b"[", b'"', b":", b",", b"1e999", b"\\ud800", b"null", b"\xff", b"\n", b'"NServiceBus.MessageId"']


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("store", ["sqlite", "postgres"], indirect=True)
def test_random_rows(store: Store, hook: DelayedStoreHook) -> None:
    """Whatever others insert, each row is handed out once, and a reply beside it is read."""
    chance = Random(34)
    any_type = store.schema is None
    table = '"q"' if store.schema is None else f'{quoted(store.schema)}."q"'
    insert_row = text(f"INSERT INTO {table} (id, headers, body) VALUES (:id, :headers, :body)")

    def bits(most: int) -> bytes:
        return b"".join(chance.choices([*PIECES, chance.randbytes(3)], k=chance.randrange(most)))

    def headers() -> str | bytes:
        of_id = b'{"NServiceBus.MessageId":' + bits(3) + b"}"
        found = chance.choice([bits(12), of_id, b"[" * chance.randrange(99_999)])
        return found if any_type and chance.random() < 0.3 else found.decode(errors="replace").replace("\0", "")

    good = [f"good{number}" for number in range(RANDOM_ROWS // 50)]
    for name in good:
        insert(store, hook, name, headers={"NServiceBus.RelatedTo": name})
        bodies = [chance.choice([None, bits(20)]) for _ in range(50)]
        with hook.engine.begin() as connection:
            connection.execute(
                insert_row, [{"id": str(uuid4()), "headers": headers(), "body": body} for body in bodies]
            )
    with closing(QueueTableReplies(store.conn_id, store.hook().engine, "q", schema=store.schema)) as replies:
        keys = replies.collect(good)
        assert [replies.read(name, keys[name]).message_id for name in good] == good
    received: list[QueueRow] = []
    with closing(
        QueueTableReceiver(store.conn_id, store.hook().engine, "q", schema=store.schema, body_limit=1000)
    ) as receiver:
        while len(received) < 51 * len(good):
            received += receiver.receive(chance.randrange(1, 200))
            receiver.done()
    assert [row.message_id for row in received if row.message_id in good] == good
    assert store.rows(hook, "q") == []


@on_postgres
def test_a_row_with_the_id_of_a_message_and_endless_content_is_another(store: Store, hook: DelayedStoreHook) -> None:
    def dispatch() -> None:
        dispatcher = store.dispatcher(hook)
        dispatcher.once()
        dispatcher.close()

    hook.send([message("first", hook.now()), message("second", hook.now())])
    harmless = peak(dispatch)
    message_id = str(uuid4())
    store.sql(
        hook,
        "INSERT INTO {s}q (id, headers, body) VALUES"
        f" ('{message_id}', '[' || repeat('[],', 2000000) || '[]]', convert_to(repeat('x', 20000000), 'UTF8'))",
    )
    hook.send([message(message_id, hook.now()), message("behind", hook.now())])
    assert peak(dispatch) < 3 * harmless
    ((_, retries, reason),) = store.given_up(hook).values()
    assert (retries, reason) == (1, "table 'q' has this id with other content")
    assert len(store.rows(hook, "q")) == 4


@on_postgres
def test_a_dispatcher_wakes_the_watcher(store: Store, hook: DelayedStoreHook, monkeypatch) -> None:
    # but for a notification, nothing would come within an hour
    monkeypatch.setattr("airflow_delayed.store.notify.SAFETY", 3600.0)

    async def watch() -> None:
        async with triggerer(watcher(store)) as one:
            for number in range(1, 6):
                await asyncio.to_thread(insert, store, hook, f"m{number}")
                await one.until(*(f"m{each}" for each in range(1, number + 1)))

    asyncio.run(watch())


@pytest.fixture
def proxied(store: Store, connect: Connect, request: pytest.FixtureRequest) -> Iterator[Proxy]:
    """The connection "proxied" to the store's database."""
    url = urlsplit(request.getfixturevalue("postgres_url" if "postgres" in request.node.name else "mariadb_url"))
    with proxy(url.port, url.hostname) as made:
        connect("proxied", url._replace(netloc=url.netloc.rpartition("@")[0] + f"@127.0.0.1:{made.port}").geturl())
        yield made


@on_servers
def test_a_lost_connection_doubles_no_row(store: Store, hook: DelayedStoreHook, proxied: Proxy, caplog) -> None:
    async def watch() -> None:
        async with triggerer(watcher(store, conn_id="proxied")) as one:
            one.hold.add(1)
            insert(store, hook, "a")
            await one.until("a")
            # stored while the database cannot be reached
            assert proxied.cut() >= 1
            insert(store, hook, "b")
            one.hold.clear()
            one.store(one.unstored)
            await one.until("a", "b")

    asyncio.run(watch())
    assert store.rows(hook, "q") == []
    assert "1 rows of table 'q' are handled and not deleted yet, which is tried again" in caplog.text


@on_servers
def test_it_takes_one_connection_and_where_it_listens_a_second(
    store: Store, hook: DelayedStoreHook, proxied: Proxy, request: pytest.FixtureRequest
) -> None:
    async def watch() -> None:
        async with triggerer(watcher(store, conn_id="proxied")) as one:
            for number in range(1, 5):
                await asyncio.to_thread(insert, store, hook, f"m{number}")
                await one.until(*(f"m{each}" for each in range(1, number + 1)))

    asyncio.run(watch())
    assert proxied.taken == (2 if "postgres" in request.node.name else 1)


@on_servers
def test_its_user_needs_rights_to_the_table_alone(
    store: Store, hook: DelayedStoreHook, connect: Connect, request: pytest.FixtureRequest
) -> None:
    postgres = "postgres" in request.node.name
    url = request.getfixturevalue("postgres_url" if postgres else "mariadb_url")
    user, mark = f"watcher_{uuid4().hex[:8]}", '"' if postgres else "`"
    schema = store.schema.replace('"', '""') if postgres else store.schema
    table = f"{mark}{schema}{mark}.{mark}q{mark}"
    host = "" if postgres else "@'%'"
    usage = [f"GRANT USAGE ON SCHEMA {mark}{schema}{mark} TO {user}"] if postgres else []
    word = "PASSWORD 'x'" if postgres else "IDENTIFIED BY 'x'"
    run_sql(url, f"CREATE USER {user}{host} {word}", *usage)
    run_sql(url, f"GRANT SELECT, UPDATE, DELETE ON {table} TO {user}{host}")
    parts = urlsplit(url)
    # on MariaDB a database would have to be one that the user may use
    path = parts.path if postgres else "/"
    address = parts._replace(netloc=f"{user}:x@{parts.hostname}:{parts.port}", path=path)
    connect("limited", address.geturl())

    async def watch() -> None:
        async with triggerer(watcher(store, conn_id="limited")) as one:
            await asyncio.to_thread(insert, store, hook, "a")
            await one.until("a")

    try:
        asyncio.run(watch())
    finally:
        run_sql(url, *([f"DROP OWNED BY {user}"] if postgres else []), f"DROP USER {user}{host}")
    assert store.rows(hook, "q") == []


def test_what_is_wrong_is_named_and_waited_for(store: Store, hook: DelayedStoreHook, caplog) -> None:
    async def watch() -> None:
        async with triggerer(watcher(store, "later")) as one:
            await eventually(lambda: "there is no table 'later'; run TopologyInstallOperator" in caplog.text)
            store.hook(None).install(["later"], create_destinations=True)
            insert(store, hook, "a", destination="later")
            await one.until("a")

    asyncio.run(watch())
    assert caplog.text.count("cannot watch queue table 'later'") == 1


@on_sqlite
@pytest.mark.parametrize(
    "options, problem",
    [
        ({"conn_id": "unknown"}, "The conn_id `unknown` isn't defined"),
        (
            {"conn_id": "broker"},
            "connection 'broker' is of type 'rabbitmq', and no store",
        ),
        ({"queue": "users"}, "table 'users' has no column headers: it is no queue table"),
        ({"queue": "delayed_messages"}, "table 'delayed_messages' has no column id: it is no queue table"),
    ],
)
def test_bad_input_is_named(store: Store, hook: DelayedStoreHook, connect: Connect, caplog, options, problem) -> None:
    connect("broker", conn_type="rabbitmq", host="localhost", password="hush")
    store.sql(hook, 'CREATE TABLE "users" (id INTEGER, expires TIMESTAMP)')

    async def watch() -> None:
        async with triggerer(watcher(store, **options)):
            await eventually(lambda: problem in caplog.text)

    asyncio.run(watch())
    assert "hush" not in caplog.text


def test_an_event_that_is_never_stored_is_fired_again(store: Store, hook: DelayedStoreHook) -> None:
    """Airflow fails the watcher after ``[triggerer] shared_stream_ack_timeout``, and starts it again."""

    async def watch() -> None:
        one = Triggerer()
        one.manager = SharedStreamManager(ack_timeout=0.3)
        try:
            one.hold.add(1)
            one.watch(1, watcher(store))
            insert(store, hook, "a")
            await one.until("a")
            await eventually(lambda: one.failed)
            assert type(one.failed.pop(1)).__name__ == "AckTimeout"
            one.hold.clear()
            one.unstored.clear()
            # this one is stored, however long a slow machine takes
            one.manager = SharedStreamManager()
            one.watch(1, watcher(store))
            await one.until("a", "a")
        finally:
            await one.stop()

    asyncio.run(watch())
    assert store.rows(hook, "q") == []


@on_postgres
def test_behind_a_pooler_in_transaction_mode_it_polls(
    store: Store, hook: DelayedStoreHook, connect: Connect, postgres_url: str, caplog
) -> None:
    names = [f"m{number:02}" for number in range(30)]

    async def watch() -> None:
        async with triggerer(watcher(store, conn_id="pooled", batch_size=2)) as one:
            await asyncio.to_thread(insert, store, hook, *names)
            await one.until(*names)
            await eventually(lambda: "a pooler must give LISTEN a connection of its own" in caplog.text)
            await asyncio.to_thread(insert, store, hook, "later")
            await one.until(*names, "later")

    with pgbouncer.running(postgres_url) as url:
        connect("pooled", url)
        asyncio.run(watch())
    assert store.rows(hook, "q") == []
    assert "polled every 1 s until then" in caplog.text
    assert "cannot watch" not in caplog.text
