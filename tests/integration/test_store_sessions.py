"""What a connection to a server is, whatever the connection's extras and the server's settings are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from sqlalchemy import text
from support.certificates import Authority

from airflow_delayed.errors import InputError, TransportUnavailable
from airflow_delayed.hooks.store import DelayedStoreHook
from services import mariadb
from services.process import free_port

Connect = Callable[..., str]


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
    with mariadb.running(tls=Authority(folder, "ours").sign("localhost")) as made:
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
