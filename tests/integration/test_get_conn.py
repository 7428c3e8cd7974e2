"""get_conn() of the hooks: the client's own connection, as Airflow's users expect it."""

from __future__ import annotations

from contextlib import closing

import pytest
from sqlalchemy import text
from support.stores import Store

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from services.process import free_port


def test_a_store_gives_the_drivers_connection(store: Store):
    hook = store.hook()
    with closing(hook.get_conn()) as connection, closing(connection.cursor()) as cursor:
        cursor.execute("SELECT 1 + 1")
        assert cursor.fetchone()[0] == 2
    # what is not committed is not there
    with closing(hook.get_conn()) as connection, closing(connection.cursor()) as cursor:
        cursor.execute("CREATE TABLE get_conn_left (a INTEGER)")
        connection.commit()
        cursor.execute("INSERT INTO get_conn_left VALUES (1)")
    with closing(hook.get_conn()) as connection, closing(connection.cursor()) as cursor:
        cursor.execute("SELECT count(*) FROM get_conn_left")
        assert cursor.fetchone()[0] == 0
        cursor.execute("DROP TABLE get_conn_left")
        connection.commit()


def test_a_connection_in_use_is_closed_when_it_comes_back(store: Store):
    hook = store.hook()
    used = hook.engine.connect()
    driver = used.connection.driver_connection
    used.scalar(text("SELECT 1"))
    hook.close()
    assert used.scalar(text("SELECT 1")) == 1
    used.close()
    with pytest.raises(hook.engine.dialect.loaded_dbapi.Error):
        driver.cursor().execute("SELECT 1")


def test_rabbitmq_gives_pikas_connection(using):
    hook = using()
    with hook.get_conn() as connection, hook.get_conn() as another:
        channel = connection.channel()
        channel.queue_declare("mine", exclusive=True)
        channel.basic_publish("", "mine", b"body")
        assert channel.basic_get("mine", auto_ack=True)[2] == b"body"
        assert another is not connection
    assert connection.is_closed
    assert hook.test_connection()[0]


def test_a_broker_that_is_away(connect):
    connect("away", conn_type="rabbitmq", host="127.0.0.1", port=free_port(), extra={"connection_timeout": 500})
    with pytest.raises(TransportUnavailable, match="connection 'away'"):
        RabbitMQDelayHook("away").get_conn()
