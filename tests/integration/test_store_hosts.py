"""Hosts of a store: timeouts of the connections by each driver, and several hosts of PostgreSQL."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from urllib.parse import unquote, urlsplit

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from support.stores import Transport, choose_driver, message, run_sql

from airflow_delayed.delivery import Connection
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.dispatch.dispatcher import Dispatcher
from services import postgres
from services.process import free_port

pytestmark = pytest.mark.mariadb

SECOND = timedelta(seconds=1)


def fields(url: str, conn_type: str, **others: object) -> dict[str, object]:
    """The fields of the connection form for a URL."""
    parts = urlsplit(url)
    return {
        "conn_type": conn_type,
        "host": parts.hostname,
        "port": parts.port,
        "login": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "schema": parts.path[1:],
        **others,
    }


def option(hook: DelayedStoreHook, name: str) -> int:
    """An option of TCP of the connection that the hook uses."""
    with hook.engine.connect() as connection:
        number = os.dup(connection.connection.driver_connection.fileno())
        with closing(socket.socket(fileno=number)) as opened:
            return opened.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_the_system_asks_a_silent_host_whether_it_is_alive(
    driver: str, postgres_url: str, connect, monkeypatch: pytest.MonkeyPatch
):
    choose_driver(monkeypatch, driver)
    hook = DelayedStoreHook(connect("db", **fields(postgres_url, "postgres")), "broker")
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    found = {name: option(hook, name) for name in names}
    hook.close()
    assert found == {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15_000}


@pytest.mark.parametrize(
    "client", ["mysqlclient", "mysql-connector-python", pytest.param("its Python alone", marks=pytest.mark.long)]
)
def test_a_statement_of_mysql_that_takes_too_long_is_given_up(
    client: str, mariadb_url: str, connect, monkeypatch: pytest.MonkeyPatch
):
    if client == "its Python alone":
        client = "mysql-connector-python"
        monkeypatch.setattr("mysql.connector.HAVE_CEXT", False)
    form = fields(mariadb_url, "mysql", extra={"client": client, "read_timeout": 1})
    with closing(DelayedStoreHook(connect("db", **form))) as hook:
        with pytest.raises(DBAPIError) as raised, hook.engine.connect() as connection:
            connection.execute(text("SELECT SLEEP(60)"))
        assert raised.value.connection_invalidated
        # its late answer is nobody's
        with hook.engine.connect() as connection:
            assert connection.execute(text("SELECT 'next'")).scalar_one() == "next"


def test_an_extra_overrides_a_timeout(postgres_url: str, connect):
    extra = {"keepalives_idle": 77, "tcp_user_timeout": 6000}
    hook = DelayedStoreHook(connect("db", **fields(postgres_url, "postgres", extra=extra)), "broker")
    found = [option(hook, name) for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_USER_TIMEOUT")]
    hook.close()
    assert found == [77, 3, 6000]


@pytest.fixture(scope="module")
def pair() -> Iterator[list[postgres.Postgres]]:
    """Two servers with one password; the first can only be read, as a standby."""
    with ExitStack() as stack:
        servers = [stack.enter_context(postgres.running()) for _ in range(2)]
        for server in servers:
            run_sql(server.url, "ALTER USER postgres PASSWORD 'of both'")
        first = servers[0].url.replace(servers[0].url.split(":")[2].split("@")[0], "of%20both")
        run_sql(first, "ALTER ROLE postgres SET default_transaction_read_only = on")
        yield servers


def hosts(pair: list[postgres.Postgres], *ports: int | None, **extra: object) -> dict[str, object]:
    named = fields(pair[1].url, "postgres", password="of both", host=",".join(["127.0.0.1"] * len(ports)))
    return {**named, "port": None, "extra": {"port": ",".join(map(str, ports)), **extra}}


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_of_several_hosts_the_one_that_can_be_written_to_is_used(
    pair: list[postgres.Postgres], connect, monkeypatch: pytest.MonkeyPatch, driver: str
):
    """Behind a closed port and a host that can only be read, as before and after a promotion."""
    choose_driver(monkeypatch, driver)
    first, second = (urlsplit(server.url).port for server in pair)
    conn_id = connect("cluster", **hosts(pair, closed := free_port(), first, second))
    with closing(DelayedStoreHook(conn_id, "broker")) as hook:
        hook.install([])
        hook.send([message(driver, hook.now() - SECOND)])
        with hook.engine.connect() as connection:
            assert connection.execute(text("SELECT inet_server_port()")).scalar() == second
        transport = Transport()
        dispatcher = Dispatcher(
            hook.engine,
            hook.tables,
            conn_id=conn_id,
            deliver_conn_ids=["broker"],
            transports=lambda name, clock: transport,
        )
        assert dispatcher.run().dispatched == 1
        # the first is named whichever of them is at work
        assert hook.own_dataset().namespace == f"postgres://127.0.0.1:{closed}"


def test_a_host_that_can_only_be_read_is_used_where_the_connection_says_so(pair: list[postgres.Postgres], connect):
    first, second = (urlsplit(server.url).port for server in pair)
    conn_id = connect("readers", **hosts(pair, first, second, target_session_attrs="any"))
    with closing(DelayedStoreHook(conn_id, "broker")) as hook, hook.engine.connect() as connection:
        assert connection.execute(text("SELECT inet_server_port()")).scalar() == first


def test_spark_reads_the_same_form(pair: list[postgres.Postgres]):
    from airflow_delayed.spark.connections import engine_of

    first, second = (urlsplit(server.url).port for server in pair)
    engine = engine_of(Connection(conn_id="cluster", **hosts(pair, first, second)))
    with engine.connect() as connection:
        assert connection.execute(text("SELECT inet_server_port()")).scalar() == second
    engine.dispose()


def test_hosts_with_one_port_need_no_extra(pair: list[postgres.Postgres], connect):
    port = urlsplit(pair[1].url).port
    form = fields(pair[1].url, "postgres", password="of both", host="127.0.0.2,127.0.0.1")
    with closing(DelayedStoreHook(connect("cluster", **form), "broker")) as hook:
        assert hook.now()
        assert hook.own_dataset().namespace == f"postgres://127.0.0.2:{port}"
