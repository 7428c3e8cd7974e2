"""Queries and functions as sources: on PostgreSQL and MariaDB, and in DAGs as Airflow runs them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from urllib.parse import unquote, urlsplit

import pytest
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowFailException
from support.send_runs import NOW

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.identity import key_id
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator
from airflow_delayed.sources import SqlSource

DUE = datetime(2030, 5, 6, 12, tzinfo=timezone.utc)


pytestmark = pytest.mark.usefixtures("spools")


@pytest.fixture
def postgres(postgres_url, connect):
    return connect("shop", postgres_url)


def test_postgresqls_own_types(run, postgres, spools):
    sql = """
        SELECT '9b2d5f0e-7a55-4b9f-9d8e-0a1b2c3d4e5f'::uuid AS message_id, '{"order": [1]}'::jsonb AS value,
            '{"type": "Reminder"}'::jsonb AS headers, '2030-05-06 14:00+02'::timestamptz AS due_at,
            NULL::numeric AS delay_seconds, NULL AS timezone, 'a%b'::varchar AS tag
        UNION ALL SELECT 'cafe0000-7a55-4b9f-9d8e-0a1b2c3d4e5f', '7', NULL, NULL, 1.5, NULL, NULL
    """
    with pytest.raises(AirflowFailException, match="row 2, column value: must be text, bytes, or a list"):
        run.execute(source=SqlSource(sql, postgres))
    run.execute(source=SqlSource(sql.replace("'7'", "'{}'"), postgres))
    first, second = run.transport.sent
    assert (first.message_id, first.body) == ("9b2d5f0e-7a55-4b9f-9d8e-0a1b2c3d4e5f", b'{"order":[1]}')
    assert (first.headers, first.due_at, first.tag) == ({"type": "Reminder"}, DUE, "a%b")
    assert (second.body, second.due_at, second.headers) == (b"{}", NOW + timedelta(seconds=1.5), {})
    assert list(spools.iterdir()) == []


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_numbers_of_json_are_sent_as_they_are_written(run, connect, postgres_url, driver):
    connect("shop", f"{postgres_url}?sqlalchemy_scheme=postgresql%2B{driver}")
    sql = """
        SELECT '{"a": [12345678901234567.89, 1.10], "b": 1e2}'::jsonb AS value, '1.50'::jsonb AS delay_seconds,
            '7.10'::jsonb AS part
        UNION ALL SELECT '{"a": 1.10}', '2', '8'
    """
    run.execute(source=SqlSource(sql, "shop"), id_columns=["part"])
    first, second = run.transport.sent
    assert (first.body, second.body) == (b'{"a":[12345678901234567.89,1.10],"b":100}', b'{"a":1.10}')
    assert (first.due_at, first.message_id) == (NOW + timedelta(seconds=1.5), key_id(("part",), (7.1,)))


def test_local_times_with_the_zone_of_each_row(run, postgres):
    """Of 02:30 in a gap the clock has moved on; of one that comes twice it is the first."""
    sql = """
        SELECT body, due_at::timestamp, timezone FROM (VALUES
            ('berlin', '2030-05-06 14:00', 'Europe/Berlin'), ('new york', '2030-05-06 08:00', 'America/New_York'),
            ('default', '2030-05-06 12:00', NULL),
            ('gap', '2030-03-31 02:30', 'Europe/Berlin'), ('fold', '2030-10-27 02:30', 'Europe/Berlin')
        ) AS due (body, due_at, timezone)
    """
    with pytest.raises(AirflowFailException, match="row 3, column due_at: 2030-05-06 12:00:00 has no time zone"):
        run.execute(source=SqlSource(sql, postgres))
    run.execute(source=SqlSource(sql, postgres), timezone="UTC")
    found = {message.body.decode(): message.due_at for message in run.transport.sent}
    assert found == {
        "berlin": DUE,
        "new york": DUE,
        "default": DUE,
        "gap": datetime(2030, 3, 31, 1, 30, tzinfo=timezone.utc),
        "fold": datetime(2030, 10, 27, 0, 30, tzinfo=timezone.utc),
    }


def test_many_rows_and_parameters_and_keys_of_several_columns(run, postgres):
    sql = """
        SELECT n AS "order", n::numeric / 4 AS part, decode('ff', 'hex') AS body, %(due)s::timestamptz AS due_at
        FROM generate_series(1, 20000) AS n
    """
    source = SqlSource(sql, postgres, parameters={"due": DUE.isoformat()})
    assert run.execute(source=source, id_columns=["order", "part"])["sent"] == 20_000
    assert {message.body for message in run.transport.sent} == {b"\xff"}
    ids = run.ids()
    run.transport.sent.clear()
    listed = [{"order": n, "part": Decimal(n) / 4, "body": b"\xff", "due_at": DUE} for n in range(1, 101)]
    run.execute(messages=listed, id_columns=["order", "part"])
    assert run.ids() == ids[:100]


def test_what_a_query_writes_is_rolled_back(run, postgres):
    sql = "CREATE TABLE of_a_source AS SELECT 'x' AS value"
    with pytest.raises(AirflowFailException, match="on connection 'shop'"):
        run.execute(source=SqlSource(sql, postgres))
    with pytest.raises(AirflowFailException, match='relation "of_a_source" does not exist'):
        run.execute(source=SqlSource("SELECT value, 1 AS delay_seconds FROM of_a_source", postgres))


def test_a_database_that_is_away_is_no_error_of_the_input(run, connect):
    connect("away", conn_type="postgres", host="127.0.0.1", port=1, login="a", password="s3cret", schema="b")
    with pytest.raises(TransportUnavailable, match="the query on connection 'away' failed") as caught:
        run.execute(source=SqlSource("SELECT 1", "away"))
    assert "s3cret" not in str(caught.value)


def test_times_of_a_session_that_writes_them_in_another_form(run, connect, postgres_url):
    url = urlsplit(postgres_url)
    login, password = (unquote(part or "") for part in (url.username, url.password))
    there = {"conn_type": "postgres", "host": url.hostname, "port": url.port, "schema": url.path[1:]}
    extra = {"options": "-c datestyle=German,DMY"}
    connect("shop", **there, login=login, password=password, extra=extra)
    sql = "SELECT 'x' AS value, TIMESTAMPTZ '2030-05-06 12:00:00+00' AS due_at"
    assert run.execute(source=SqlSource(sql, "shop"))["sent"] == 1
    assert run.transport.sent[0].due_at == DUE


@pytest.mark.parametrize("driver", ["mysqlclient", "mysql-connector-python"])
def test_mariadb_through_each_driver(run, connect, mariadb_url, driver):
    url = urlsplit(mariadb_url)
    login, password = (unquote(part or "") for part in (url.username, url.password))
    connect(
        "shop",
        conn_type="mysql",
        host=url.hostname,
        port=url.port,
        login=login,
        password=password,
        schema=url.path[1:],
        extra={"client": driver},
    )
    sql = """
        SELECT CONCAT('order-', seq) AS message_id, JSON_OBJECT('n', seq) AS value, JSON_OBJECT('a', 'b') AS headers,
            TIMESTAMP'2030-05-06 12:00:00' AS due_at FROM seq_1_to_3000
    """
    assert run.execute(source=SqlSource(sql, "shop"), timezone="UTC")["sent"] == 3000
    message = run.transport.sent[0]
    assert (message.message_id, message.body, message.headers) == ("order-1", b'{"n": 1}', {"a": "b"})
    assert message.due_at == DUE


@pytest.fixture
def database(tmp_path, connect):
    """A SQLite database for queue tables and orders; a function reads from it."""
    path = tmp_path / "shop.db"
    connect("shop", conn_type="sqlite", host=str(path))

    def rows(statement):
        with closing(sqlite3.connect(path)) as connection, connection:
            return connection.execute(statement).fetchall()

    rows("CREATE TABLE orders (customer TEXT, text TEXT)")
    rows("INSERT INTO orders VALUES ('ada', 'hello Ada'), ('bob', 'hello Bob')")
    return rows


def install():
    return TopologyInstallOperator(task_id="install", conn_id="shop", destinations=["mail"], create_destinations=True)


def waiting(database):
    return sorted(bytes(body).decode() for (body,) in database('SELECT "State" FROM delayed_messages'))


def test_a_function_and_a_query_in_a_dag(database, run_dag, tmp_path, spools):
    (tmp_path / "orders.sql").write_text(
        "SELECT text || ' of {{ dag.dag_id }}' AS value, 3600 AS delay_seconds FROM orders WHERE customer = :customer"
    )
    with DAG("shop", schedule=None, template_searchpath=[str(tmp_path)]) as dag:

        @task
        def customers():
            return ["ada", "bob"]

        @task
        def customer():
            return "bob"

        @task.delayed_send(conn_id="shop", destination="mail")
        def remind(name, word, dag_run=None):
            for number in range(2):
                yield {"value": f"{word} {name} {number}, {dag_run.dag_id}", "delay_seconds": 3600}

        source = SqlSource("orders.sql", "shop", parameters={"customer": customer()})
        send = DelayedSendOperator(task_id="send", conn_id="shop", destination="mail", source=source)
        install() >> [send, remind.partial(word="{{ dag.dag_id }}").expand(name=customers())]
    run = run_dag(dag)
    states = {(ti.task_id, ti.map_index): ti.state for ti in run.get_task_instances()}
    assert states.pop(("remind", 1)) == "success"
    assert set(states.values()) == {"success"}
    assert waiting(database) == [
        "hello Bob of shop",
        *(f"shop {name} {number}, shop" for name in ("ada", "bob") for number in range(2)),
    ]
    assert list(spools.iterdir()) == []


def test_a_query_that_is_mapped(database, run_dag):
    with DAG("mapped", schedule=None) as dag:
        sources = [
            SqlSource(
                "SELECT text || '{{ ti.map_index }}' AS value, 3600 AS delay_seconds FROM orders WHERE customer = ?",
                "shop",
                parameters=[name],
            )
            for name in ("ada", "bob")
        ]
        send = DelayedSendOperator.partial(task_id="send", conn_id="shop", destination="mail").expand(source=sources)
        install() >> send
    run_dag(dag)
    assert waiting(database) == ["hello Ada0", "hello Bob1"]
