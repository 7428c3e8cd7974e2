"""What a session of a store is, whatever the server's settings are; a password that changes; a pooler."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import text
from support.certificates import Authority
from support.rabbitmq import eventually
from support.stores import Store, Transport, message, run_sql

from airflow_delayed.cli.service import DispatchService
from airflow_delayed.errors import DelayedError, InputError, TransportUnavailable
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.policy import DispatchPolicy
from services import mariadb, pgbouncer
from services.process import free_port

Connect = Callable[..., str]

LETTERS = "Łódź \U0001f600 \\ ' \" || %"
OTHER_SETTINGS = (
    "--character-set-server=latin1",
    "--default-storage-engine=MyISAM",
    "--sql-mode=ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT,PAD_CHAR_TO_FULL_LENGTH",
)
#: What a role or a database may set for its sessions.
OF_A_ROLE = {
    "datestyle": "German,DMY",
    "intervalstyle": "iso_8601",
    "client_encoding": "latin1",
    "standard_conforming_strings": "off",
    "timezone": "America/Caracas",
    "bytea_output": "escape",
    "extra_float_digits": "-15",
    "default_transaction_isolation": "serializable",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def ca(folder: Path) -> str:
    return str(folder / "ours.pem")


@pytest.fixture(scope="module")
def wrong_ca(folder: Path) -> str:
    return str(Authority(folder, "theirs").cacertfile)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[dict[str, object]]:
    """The fields of a connection to a MariaDB that offers TLS, and has other settings than ours."""
    with mariadb.running(*OTHER_SETTINGS, tls=Authority(folder, "ours").sign("localhost")) as made:
        url = urlsplit(made.url)
        login, password = unquote(url.username or ""), unquote(url.password or "")
        yield {
            "conn_type": "mysql",
            "host": "127.0.0.1",
            "port": url.port,
            "login": login,
            "password": password,
            "schema": url.path[1:],
        }


def cipher(conn_id: str) -> str:
    """The cipher of a store's session; empty: it is in the clear."""
    with closing(DelayedStoreHook(conn_id)) as hook, hook.engine.connect() as connection:
        return str(connection.execute(text("SHOW SESSION STATUS LIKE 'Ssl_cipher'")).one()[1])


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    "extra",
    [
        {"ssl": {"ca": "CA"}},
        {"ssl": {"ca": "CA"}, "cursor": "DictCursor", "charset": "latin1", "connect_timeout": 30},
        {"client": "mysql-connector-python", "ssl_ca": "CA", "ssl_verify_cert": True},
    ],
)
def test_tls_that_was_asked_for_is_used_and_a_wrong_authority_refused(
    server: dict[str, object], connect: Connect, ca: str, wrong_ca: str, extra: dict[str, object], as_text: bool
) -> None:
    if as_text and "ssl" in extra:
        extra = {**extra, "ssl": json.dumps(extra["ssl"])}
    given = json.dumps(extra)
    assert cipher(connect("over_tls", **server, extra=json.loads(given.replace("CA", ca))))
    refused = connect("refused", **server, extra=json.loads(given.replace("CA", wrong_ca)))
    with pytest.raises(TransportUnavailable, match=r"connection 'refused': .*(?i:certificate)"):
        DelayedStoreHook(refused).now()


@pytest.mark.parametrize(
    "extra, reason",
    [
        (
            {"ssl_ca": "/ca.pem"},
            "mysqlclient ignores the extra 'ssl_ca', and would .*; write .*\"ssl\"",
        ),
        ({"sslmode": "verify-full"}, "ignores the extra 'sslmode'"),
        ({"client": "mysql-connector-python", "ssl": {"ca": "/ca.pem"}}, "ignores the extra 'ssl', .*\"ssl_ca\""),
        ({"client": "pymysql"}, "the extra client='pymysql' is none of mysqlclient, mysql-connector-python"),
    ],
)
def test_an_extra_that_the_driver_would_ignore_is_refused(connect: Connect, extra: dict[str, object], reason: str):
    connect("odd", conn_type="mysql", host="127.0.0.1", port=1, extra=extra)
    with pytest.raises(InputError, match=reason):
        DelayedStoreHook("odd").now()
    well, shown = DelayedStoreHook("odd").test_connection()
    assert not well
    assert "'odd'" in shown


def test_a_password_that_airflow_fetches(server: dict[str, object], connect: Connect, monkeypatch: pytest.MonkeyPatch):
    token = server["password"], server["port"]
    monkeypatch.setattr("airflow.providers.mysql.hooks.mysql.MySqlHook.get_iam_token", lambda self, conn: token)
    connect("iam", **{**server, "password": ""}, extra={"iam": True})
    with closing(DelayedStoreHook("iam")) as hook:
        assert hook.now()


def test_an_address_of_ipv6_reaches_the_driver(connect: Connect) -> None:
    connect("six", conn_type="mysql", host="::1", port=free_port(), login="u")
    with pytest.raises(TransportUnavailable, match=r"connection 'six': .*::1"):
        DelayedStoreHook("six").now()


def with_extra(url: str, extra: dict[str, object]) -> dict[str, object]:
    parts = urlsplit(url)
    login, password = unquote(parts.username or ""), unquote(parts.password or "")
    named = {"login": login, "password": password, "schema": parts.path[1:], "extra": extra}
    return {"conn_type": "postgres", "host": parts.hostname, "port": parts.port, **named}


@pytest.mark.parametrize("kind", ["mysql", "postgres"])
def test_other_settings_of_a_server_change_no_text_and_no_time(kind: str, request: pytest.FixtureRequest, connect):
    schema = f"sessions_{uuid4().hex[:8]}"
    if kind == "postgres":
        options = " ".join(f"-c {name}={value}" for name, value in OF_A_ROLE.items())
        fields = with_extra(request.getfixturevalue("postgres_url"), {"options": options})
    else:
        fields = request.getfixturevalue("server")
    connect("other", **fields)
    with closing(DelayedStoreHook("other", schema=schema)) as hook:
        with hook.engine.begin() as connection:
            connection.execute(text(f"CREATE SCHEMA {schema}"))
        hook.install(["mail"], create_destinations=True)
        assert hook.verify(["mail"]).ok
        now = hook.now()
        first = message("a", now, destination="mail", body=LETTERS.encode(), headers={"where": LETTERS})
        later = message("b", now + timedelta(days=1), destination="mail", tag=LETTERS)
        hook.send([first, later])
        assert {row.message_id: row.due_at for row in hook.list()} == {"a": first.due_at, "b": later.due_at}
        assert hook.cancel(tag=LETTERS).changed == 1
        assert hook.dispatcher(["other"], lambda name, clock: Transport()).run().dispatched == 1
        with hook.engine.begin() as connection:
            table = connection.dialect.identifier_preparer.quote("mail")
            row = connection.execute(text(f"SELECT * FROM {schema}.{table}")).mappings().one()
            connection.execute(text(f"DROP SCHEMA {schema}" + (" CASCADE" if kind == "postgres" else "")))
    sent = {name.lower(): value for name, value in row.items()}
    assert json.loads(sent["headers"])["where"] == LETTERS
    assert bytes(sent["body"]) == LETTERS.encode()


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_an_encoding_that_cannot_hold_all_texts_is_refused(postgres_url: str, connect: Connect, encoding: str) -> None:
    name = f"narrow_{uuid4().hex[:8]}"
    with closing(psycopg.connect(postgres_url, autocommit=True)) as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
        try:
            connect("narrow", **{**with_extra(postgres_url, {}), "schema": name})
            reason = f"database '{name}' has the encoding {encoding}, .*ENCODING 'UTF8' TEMPLATE template0"
            with closing(DelayedStoreHook("narrow")) as hook, pytest.raises(DelayedError, match=reason):
                hook.install([])
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_a_password_that_is_rotated_is_asked_for_again(postgres_url: str, connect: Connect) -> None:
    """The service is ready again, and dispatches through its own database."""
    role = f"rotated_{uuid4().hex[:8]}"
    run_sql(postgres_url, f"CREATE ROLE {role} LOGIN PASSWORD 'old'", f"CREATE SCHEMA {role} AUTHORIZATION {role}")
    fields = {**with_extra(postgres_url, {}), "login": role}
    connect("rotated", **{**fields, "password": "old"})

    def hook() -> DelayedStoreHook:
        return DelayedStoreHook("rotated", schema=role)

    service = DispatchService(hook, ["rotated"], DispatchPolicy())

    def rotate() -> None:
        try:
            eventually(lambda: service.ready().status == 200, 120)
            end = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'"
            run_sql(postgres_url, f"ALTER ROLE {role} PASSWORD 'new'", end)
            eventually(lambda: service.ready().status == 503, 120)
            connect("rotated", **{**fields, "password": "new"})
            eventually(lambda: service.ready().status == 200, 120)
            recovered.append(True)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    recovered: list[bool] = []
    try:
        with closing(hook()) as made:
            made.install([])
        thread = Thread(target=rotate)
        thread.start()
        service.run("127.0.0.1", 0)
        thread.join()
    finally:
        run_sql(postgres_url, f"DROP SCHEMA {role} CASCADE", f"DROP ROLE {role}")
    assert recovered


SETTINGS = (
    "SELECT name, setting FROM pg_settings WHERE context <> 'internal' AND name NOT IN ('application_name') ORDER BY 1"
)


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_behind_a_pooler_no_setting_reaches_another_program(store: Store, connect: Connect, postgres_url: str) -> None:
    store.installed()
    with pgbouncer.running(postgres_url) as url, closing(psycopg.connect(url)) as other:
        own = dict(other.execute(SETTINGS).fetchall())
        other.rollback()
        with closing(DelayedStoreHook(connect("pooled", url), "broker", schema=store.schema)) as pooled:
            pooled.limit_statements(30)
            now = pooled.now()
            for number in range(12):
                pooled.send([message(f"m{number}", now), message(f"n{number}", now + timedelta(days=1), tag="t")])
            assert pooled.count() == 24
            assert pooled.cancel(tag="t").changed == 12
            assert store.dispatcher(pooled, Transport()).run().dispatched == 12
            # all connections of the pool
            with closing(psycopg.connect(url)) as second, closing(psycopg.connect(url)) as third:
                for program in (other, second, third):
                    assert dict(program.execute(SETTINGS).fetchall()) == own
