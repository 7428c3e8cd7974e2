"""MariaDB through each driver that an Airflow connection of type mysql can name."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from urllib.parse import unquote, urlsplit

import pytest
from sqlalchemy import select
from support.stores import Store, Transport, message
from support.table_pools import ServerPool

from airflow_delayed.errors import LimitExceeded, TransportUnavailable
from services.process import free_port

pytestmark = pytest.mark.mariadb

LATER = datetime(2030, 1, 1, tzinfo=timezone.utc)
DRIVERS = ["mysqlclient", "mysql-connector-python"]


@pytest.fixture(params=DRIVERS)
def store(request, connect, mariadb_url):
    url = urlsplit(mariadb_url)
    connect(
        "of_driver",
        conn_type="mysql",
        host=url.hostname,
        port=url.port,
        login=unquote(url.username or ""),
        password=unquote(url.password or ""),
        schema=url.path[1:],
        extra={"client": request.param},
    )
    made = Store("of_driver", pool=ServerPool.of(mariadb_url, request.config))
    yield made
    made.close()


def test_what_is_stored_is_dispatched(store: Store):
    hook, transport = store.hook(), Transport()
    hook.install([])
    assert hook.verify([]).ok
    now = hook.now()
    first = message(
        "a",
        now - timedelta(microseconds=1),
        destination="Größe \U0001f600 ",
        body=bytes(range(256)),
        headers={"ü": "/"},
        expires_at=now + timedelta(days=1),
    )
    assert hook.send([first, message("b", now + timedelta(days=1))]).sent == 2
    assert hook.send([first]).duplicates == 1
    store.dispatcher(hook, transport).run()
    assert transport.sent == [first]
    assert hook.cancel(["b", "a"]) == {"b": "cancelled", "a": "dispatched"}


def test_big_bodies_go_in_as_many_statements_as_the_server_takes(store: Store):
    hook = store.hook()
    hook.install([])
    limit = int(store.sql(hook, "SELECT @@max_allowed_packet AS size")[0].size)
    many = [message(f"m{number:02}", LATER, body=b"\\" * (limit // 30)) for number in range(40)]
    # as text each byte of it takes two
    almost, too_big = (message("big", LATER, body=b"\\" * (limit // 2 - less)) for less in (10_000, 100))
    assert hook.send([*many, almost]).sent == 41
    with hook.engine.connect() as connection:
        bodies = dict(connection.execute(select(hook.table.c.Id, hook.table.c.State)).all())
    assert {name: bytes(body) for name, body in bodies.items()} == {one.message_id: one.body for one in [*many, almost]}
    hook.cancel(["big"])
    with pytest.raises(
        LimitExceeded, match=f"of message big .*the database takes {limit:,}; raise its max_allowed_pac"
    ):
        hook.send([message("small", LATER), too_big])
    assert hook.count() == 40


@pytest.mark.parametrize("client", DRIVERS)
def test_a_server_that_is_down(connect, client):
    connect("of_driver", conn_type="mysql", host="127.0.0.1", port=free_port(), login="u", extra={"client": client})
    with pytest.raises(TransportUnavailable, match="connection 'of_driver': "):
        Store("of_driver", None).hook().count()
