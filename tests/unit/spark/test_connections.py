from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.delivery import Connection
from airflow_delayed.errors import InputError, UnsupportedConnection
from airflow_delayed.spark.connections import ConnectionNotFound, engine_of, find, parse, with_headers
from airflow_delayed.spark.options import settings_of

FIELDS = {"conn_type": "rabbitmq", "host": "h", "port": 5, "login": "l", "password": "hush", "extra": {"ssl": True}}


def test_the_environment(tmp_path: Path) -> None:
    environ = {"AIRFLOW_CONN_BROKER": json.dumps({**FIELDS, "host": "airflows"})}
    assert find("Broker", environ=environ).host == "airflows"
    environ["DELAYED_CONN_BROKER"] = json.dumps(FIELDS)
    assert find("broker", environ=environ) == Connection(conn_id="broker", **FIELDS)


def test_a_file_by_its_path_or_as_spark_distributes_it(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"broker": FIELDS, "as_text": json.dumps(FIELDS)}))
    wanted = Connection(conn_id="broker", **FIELDS)
    assert find("broker", str(file), environ={}) == wanted
    assert find("broker", "c.json", environ={}, distributed=lambda name: str(tmp_path / name)) == wanted
    assert find("broker", environ={"DELAYED_CONNECTIONS_FILE": str(file)}) == wanted
    assert find("as_text", str(file), environ={}).password == "hush"
    with pytest.raises(ConnectionNotFound, match=r"'other' is not in the file .*, which has \['as_text', 'broker'\]"):
        find("other", str(file), environ={"AIRFLOW_CONN_OTHER": json.dumps(FIELDS)})


def test_what_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConnectionNotFound, match=r"DELAYED_CONN_BROKER of Spark's executors.*connections_file"):
        find("broker", environ={})
    with pytest.raises(ConnectionNotFound, match=r"cannot be read: No such file.*on every machine with an executor"):
        find("broker", str(tmp_path / "none.json"), environ={})


def test_headers_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "h.json"
    file.write_text('{"a": "hush"}')
    for name in (str(file), "h.json"):
        settings = settings_of({"deliver": "broker", "headers_file": name}, datetime.now(timezone.utc))
        read = with_headers(settings, distributed=lambda name: str(tmp_path / name))
        assert (settings.rules.headers, read.rules.headers) == ({}, {"a": "hush"})
    file.write_text('{"a": {"hush": 1}}')
    with pytest.raises(
        InputError, match=r"the file of headers .*h\.json cannot be read: it must be a JSON object"
    ) as no:
        with_headers(settings, distributed=lambda name: str(tmp_path / name))
    assert "hush" not in str(no.value)
    with pytest.raises(InputError, match=r"cannot be read: No such file.*on every machine with an executor"):
        with_headers(settings, distributed=lambda name: str(tmp_path / "none"))


@pytest.mark.parametrize(
    "text",
    [
        "amqp://l:hush@h",
        "[]",
        '{"host": "hush"}',
        '{"conn_type": "rabbitmq", "port": "hush"}',
        '{"conn_type": "rabbitmq", "extra": "hush"}',
        '{"conn_type": "rabbitmq", "extra": ["hush"]}',
        '{"conn_type": "rabbitmq", "colour": "hush"}',
    ],
)
def test_what_cannot_be_read_is_not_shown(text: str) -> None:
    with pytest.raises(InputError) as caught:
        find("broker", environ={"DELAYED_CONN_BROKER": text})
    assert "'broker': the environment variable DELAYED_CONN_BROKER" in str(caught.value)
    assert "hush" not in str(caught.value)


def test_a_connection_shows_its_name_and_type_alone() -> None:
    assert repr(Connection(conn_id="b", **FIELDS)) == "Connection(conn_id='b', conn_type='rabbitmq')"


_TEXT = st.text(min_size=1).filter(str.strip)


@given(login=_TEXT, password=_TEXT, host=_TEXT, schema=_TEXT)
def test_airflows_own_form_is_read(login: str, password: str, host: str, schema: str) -> None:
    from airflow.sdk import Connection as Airflows

    fields = {"login": login, "password": password, "host": host, "schema": schema, "port": 7}
    text = Airflows(conn_id="b", conn_type="amqp", extra='{"a": [1]}', **fields).as_json()
    assert parse("b", text, "") == Connection(conn_id="b", conn_type="amqp", extra={"a": [1]}, **fields)


def test_engines() -> None:
    def engine(**fields: object):
        return engine_of(Connection(conn_id="db", **fields))

    made = engine(conn_type="postgres", host="h", port=5, login="l", password="p@ss/wörd", schema="s")
    assert made.url.render_as_string(hide_password=False) == "postgresql+psycopg://l:p%40ss%2Fw%C3%B6rd@h:5/s"
    made = engine(conn_type="mysql", host="::1", login="l", schema="s", extra={"client": "mysql-connector-python"})
    assert str(made.url) == "mysql+mysqlconnector://l@[::1]/s"
    assert str(engine(conn_type="sqlite", host="/a/b.db").url) == "sqlite:////a/b.db"
    with pytest.raises(InputError, match="the extra client='pymysql' is none of mysqlclient, mysql-connector-python"):
        engine(conn_type="mysql", extra={"client": "pymysql"})
    with pytest.raises(InputError, match="mysqlclient ignores the extra 'ssl_ca', and would connect without it"):
        engine(conn_type="mysql", extra={"ssl_ca": "/ca.pem"})
    with pytest.raises(InputError, match="the extra 'ssl' is no JSON object"):
        engine(conn_type="mysql", extra={"ssl": "/ca.pem"})
    with pytest.raises(InputError, match="fetch a password"):
        engine(conn_type="postgres", extra={"iam": True})
    with pytest.raises(UnsupportedConnection):
        engine(conn_type="mssql")
