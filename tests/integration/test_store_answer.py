"""DelayedStoreHook.test_connection: what answers, or what is wrong and what to do."""

from __future__ import annotations

import re
import socket

import pytest
from sqlalchemy import update
from support.stores import Store

from airflow_delayed.hooks import store as store_hook
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.schema import VERSION
from services.process import free_port

NAMES = {"sqlite": "SQLite 3", "postgres": "PostgreSQL 1", "mariadb": "(MariaDB|MySQL) [1-9]"}
#: With a character that a URI quotes.
PASSWORD = "hunter/2"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a busy machine longer than for a user."""
    monkeypatch.setattr(store_hook, "TEST_SECONDS", 60.0)


def test_it_tells_what_answers_and_what_is_missing(store: Store, request):
    hook = store.hook()
    well, text = hook.test_connection()
    assert not well
    assert "missing" in text
    assert f"TopologyInstallOperator(conn_id='{store.conn_id}', ...) makes what is missing" in text

    hook.install([])
    well, text = hook.test_connection()
    name = NAMES[request.node.callspec.params["store"]]
    assert well
    assert re.fullmatch(rf"Connected to {name}\S*; the tables are of version {VERSION}", text), text

    with hook.engine.begin() as connection:
        connection.execute(update(hook.tables.version).values(Version=VERSION + 1, UsableFrom=VERSION + 1))
    well, text = hook.test_connection()
    assert not well
    assert "update airflow-provider-delayed here" in text


@pytest.mark.parametrize(
    "kind, extra", [("postgres", {}), ("mysql", {}), ("mysql", {"client": "mysql-connector-python"})]
)
def test_a_server_that_does_not_listen(connect, kind: str, extra: dict[str, str]):
    there = {"host": "127.0.0.1", "port": free_port(), "login": "u", "password": PASSWORD, "extra": extra}
    well, text = DelayedStoreHook(connect("away", conn_type=kind, **there)).test_connection()
    assert not well
    assert text.startswith("connection 'away': ")
    assert "hunter" not in text


def test_a_password_that_is_wrong_is_not_shown(connect, postgres_url: str):
    # the server says which user it refuses; here that is the password by mistake
    uri = re.sub(r"//[^@/]*@", "//", postgres_url).replace("//", "//hunter%2F2:hunter%2F2@", 1)
    well, text = DelayedStoreHook(connect("refused", uri)).test_connection()
    assert not well
    assert text.startswith("connection 'refused': ")
    assert '"***"' in text
    assert "hunter" not in text


def test_one_that_never_answers_is_given_up(connect, monkeypatch):
    monkeypatch.setattr(store_hook, "TEST_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connect("silent", conn_type="postgres", host="127.0.0.1", port=silent.getsockname()[1], login="u")
        well, text = DelayedStoreHook("silent").test_connection()
    assert not well
    assert "connection 'silent' did not answer within 0.2 seconds" in text


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"conn_type": "http", "host": "h"}, "which no transport serves; use one of sqlite, postgres, mysql, or"),
        ({"conn_type": "nothing-known"}, "'nothing_known', which no transport serves; use one of sqlite,"),
        ({"conn_type": "mssql"}, "'mssql', which no transport serves; use one of sqlite,"),
        ({"conn_type": "sqlite", "host": "/no/such/folder/store.db"}, "unable to open database file"),
        ({"conn_type": "postgres", "extra": {"hunter": PASSWORD}, "password": PASSWORD}, "hunter"),
    ],
)
def test_a_connection_that_makes_no_sense(connect, fields: dict[str, object], reason: str):
    well, text = DelayedStoreHook(connect("odd", **fields)).test_connection()
    assert not well
    assert reason in text
    assert PASSWORD not in text


def test_a_connection_that_is_not_there():
    well, text = DelayedStoreHook("nowhere_at_all").test_connection()
    assert not well
    assert "nowhere_at_all" in text
