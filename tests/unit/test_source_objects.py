"""Sources as objects: files, and a query that runs once a try; what DelayedSendOperator makes of them."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import time
from contextlib import closing
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from airflow.sdk import DAG, ObjectStoragePath, task
from airflow.sdk.exceptions import AirflowFailException
from airflow.serialization.helpers import serialize_template_field
from airflow.serialization.serialized_objects import DagSerialization
from support.send_runs import NOW
from support.times import by_clock

from airflow_delayed.errors import SendFailed, SourceError, SpoolError
from airflow_delayed.message import UTC
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.sources import JsonLinesSource, ParquetSource, SqlSource

DUE = "2030-05-06T12:00:00+00:00"
SELECT = "SELECT id AS message_id, text AS value, due AS due_at FROM orders ORDER BY id"


pytestmark = pytest.mark.usefixtures("spools")


@pytest.fixture
def database(tmp_path, monkeypatch):
    """A database with three orders, as the connection "shop"; a function runs a statement in it."""
    path = tmp_path / "shop.db"
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", json.dumps({"conn_type": "sqlite", "host": str(path)}))

    def run(statement, *parameters):
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(statement, parameters)

    run("CREATE TABLE orders (id TEXT, text TEXT, due TEXT)")
    for number in range(3):
        run("INSERT INTO orders VALUES (?, ?, ?)", f"order-{number}", f"body {number}", DUE)
    return run


def lines(*rows):
    """The text of JSON lines with a value and a delay each."""
    return "".join(json.dumps({"value": value, "delay_seconds": delay}) + "\n" for value, delay in rows)


def files(folder):
    return sorted(folder.iterdir()) if folder.exists() else []


def test_each_row_of_a_query_is_a_message(run, database, spools):
    summary = run.execute(source=SqlSource(SELECT, "shop"))
    assert (summary["sent"], run.ids()) == (3, ["order-0", "order-1", "order-2"])
    assert {message.due_at for message in run.transport.sent} == {datetime(2030, 5, 6, 12, tzinfo=UTC)}
    # nothing stays on the disk
    assert files(spools) == []


def test_a_retry_on_the_same_worker_sends_the_rows_of_the_first_try(run, database, spools, log):
    run.max_tries = 2
    run.transport.fail_after = 1
    with pytest.raises(SendFailed):
        run.execute(source=SqlSource(SELECT, "shop"), retries=2)
    [spool] = files(spools)
    assert spool.stat().st_mode & 0o777 == 0o600
    database("DELETE FROM orders")
    run.transport.fail_after = None
    run.execute(source=SqlSource(SELECT, "shop"), retries=2)
    assert set(run.bodies()) == {"body 0", "body 1", "body 2"}
    assert "does not run again" in log.text
    assert files(spools) == []


def test_a_retry_on_another_worker_runs_the_query_again_and_says_so(run, database, spools, log):
    run.max_tries = 1
    run.transport.fail_after = 0
    with pytest.raises(SendFailed):
        run.execute(source=SqlSource(SELECT, "shop"), retries=1)
    [spool] = files(spools)
    spool.unlink()
    database("INSERT INTO orders VALUES ('order-3', 'body 3', ?)", DUE)
    run.transport.fail_after = None
    run.execute(source=SqlSource(SELECT, "shop"), retries=1)
    assert run.ids() == ["order-0", "order-1", "order-2", "order-3"]
    assert "no rows of an earlier try are on this machine" in log.text


def test_a_cleared_task_runs_the_query_again(run, database):
    run.max_tries = 1
    run.transport.fail_after = 0
    with pytest.raises(SendFailed):
        run.execute(source=SqlSource(SELECT, "shop"), retries=1)
    run.clear()
    database("DELETE FROM orders WHERE id = 'order-0'")
    run.transport.fail_after = None
    run.execute(source=SqlSource(SELECT, "shop"), retries=1)
    assert run.ids() == ["order-1", "order-2"]


def test_the_last_try_leaves_nothing_on_the_disk(run, database, spools):
    run.transport.fail_after = 0
    with pytest.raises(SendFailed):
        run.execute(source=SqlSource(SELECT, "shop"))
    assert files(spools) == []


def test_what_a_killed_task_left_is_deleted_after_a_week(run, database, spools):
    spools.mkdir(parents=True, mode=0o700)
    old, young = spools / "old.rows", spools / "young.rows"
    for file in (old, young):
        file.touch()
    week = time.time() - timedelta(days=7).total_seconds()
    os.utime(old, (week - 60, week - 60))
    os.utime(young, (week + 3600, week + 3600))
    run.execute(source=SqlSource(SELECT, "shop"))
    assert files(spools) == [young]


@pytest.mark.parametrize(
    "sql, says",
    [
        ("SELECT text AS value FROM orders", r"the query on connection 'shop': no column due_at or delay_seconds"),
        ("SELECT 'x' AS value, 1 AS delay_seconds, 2 AS b, 3 AS b", "more than one column b"),
        ("SELECT 'x' AS value, 1 AS delay_seconds, 2 AS other", "unknown columns other"),
        ("DELETE FROM orders", "gives no rows at all; write it as a SELECT"),
        ("SELECT 'x' AS value, -1 AS delay_seconds", "row 1, column delay_seconds: -1 is negative"),
        ("SELECT 'x' AS value, 'soon' AS due_at", "column due_at: 'soon' is not a time"),
        (
            "SELECT 'x' AS value, 1 AS delay_seconds, '[1]' AS headers",
            "column headers: must be a map of text to text, not list",
        ),
        ("SELECT 'x' AS value, 1 AS delay_seconds, NULL AS message_id", "column message_id: is null"),
        ("SELECT 'x' AS value, 1 AS delay_seconds, 5 AS message_id", "column message_id: must be text of 1"),
        (" ", "did its template render to nothing"),
    ],
)
def test_a_query_that_cannot_be_sent_is_an_error_before_anything_is(run, database, spools, sql, says):
    run.max_tries = 5
    with pytest.raises(AirflowFailException, match=says):
        run.execute(source=SqlSource(sql, "shop"), retries=5)
    assert (run.bodies(), files(spools)) == ([], [])
    run.execute(source=SqlSource(SELECT, "shop"))
    assert len(run.bodies()) == 3


RENAMED = {"message_id": "id", "value": "text", "due_at": "due"}


def test_columns_of_another_name(run, database, spools):
    source = SqlSource("SELECT *, 1 AS price FROM orders ORDER BY id", "shop", columns=RENAMED)
    assert run.execute(source=source)["sent"] == 3
    assert (run.ids(), run.bodies()) == (
        [f"order-{number}" for number in range(3)],
        [f"body {number}" for number in range(3)],
    )


@pytest.mark.parametrize(
    "source", [ParquetSource, JsonLinesSource, lambda path, **more: SqlSource(path, "shop", **more)]
)
def test_what_is_no_column_of_a_message_is_an_error_when_the_dag_is_parsed(source):
    with pytest.raises(ValueError, match=r"columns= has text, and its keys are our names: destination, value,"):
        source("rows", columns={"text": "value"})


def test_a_query_that_the_database_refuses(run, database, spools):
    with pytest.raises(Exception, match=r"the query on connection 'shop' failed: no such table: orderz"):
        run.execute(source=SqlSource("SELECT * FROM orderz", "shop"))
    assert (run.bodies(), files(spools)) == ([], [])


def test_connections_that_cannot_be_read(run, monkeypatch):
    with pytest.raises(AirflowFailException, match="connection 'nowhere' of SqlSource cannot be used"):
        run.execute(source=SqlSource(SELECT, "nowhere"))
    monkeypatch.setenv("AIRFLOW_CONN_BROKER", json.dumps({"conn_type": "rabbitmq", "host": "localhost"}))
    with pytest.raises(AirflowFailException, match="'broker' of SqlSource is of type 'rabbitmq', which is no SQL"):
        run.execute(source=SqlSource(SELECT, "broker"))


def test_a_query_without_an_end_is_not_written_to_its_end(run, database, spools, monkeypatch):
    monkeypatch.setenv("AIRFLOW__DELAYED__MAX_MESSAGES_PER_RUN", "1000")
    endless = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
        " SELECT 'x' || i AS value, i AS delay_seconds FROM n"
    )
    with pytest.raises(AirflowFailException, match="1,001 messages are more than the 1,000 that"):
        run.execute(source=SqlSource(endless, "shop"))
    assert (run.bodies(), files(spools)) == ([], [])


def test_a_disk_that_is_full(run, database, spools, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SpoolError, match=r"airflow-delayed-spool-\d+: No space left on device.*Nothing was sent"):
        run.execute(source=SqlSource(SELECT, "shop"))
    assert (run.bodies(), files(spools)) == ([], [])


def test_a_folder_that_others_may_enter_takes_no_bodies(run, database, spools):
    spools.mkdir(parents=True)
    spools.chmod(0o755)
    with pytest.raises(SpoolError, match="not a folder that its user alone may enter"):
        run.execute(source=SqlSource(SELECT, "shop"))


def test_parameters_headers_and_delays(run, database):
    sql = (
        "SELECT text AS body, '{\"type\": \"Reminder\"}' AS headers, 1.5 AS delay_seconds, id AS tag, x'00ff' AS token"
        " FROM orders WHERE id > ?"
    )
    run.execute(source=SqlSource(sql, "shop", parameters=["order-1"]), id_columns=["token"])
    [message] = run.transport.sent
    assert (message.body, message.tag, message.headers) == (b"body 2", "order-2", {"type": "Reminder"})
    assert message.due_at == NOW + timedelta(seconds=1.5)


def test_ids_are_those_of_the_same_rows_in_a_list_and_in_a_file(run, database, tmp_path):
    rows = [{"value": f"body {number}", "due_at": datetime.fromisoformat(DUE)} for number in range(3)]
    run.execute(messages=rows)
    listed = run.ids()
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({**row, "due_at": DUE}) for row in rows))
    for source in (
        SqlSource("SELECT text AS value, due AS due_at FROM orders", "shop"),
        ParquetSource(str(tmp_path / "rows.parquet")),
        JsonLinesSource(str(tmp_path / "rows.jsonl")),
        str(tmp_path / "rows.jsonl"),
    ):
        run.transport.sent.clear()
        run.states.clear()
        run.execute(source=source)
        assert run.ids() == listed


def test_rejects_do_not_lie_in_the_source(tmp_path, run):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "part.jsonl").write_text(lines(("x", "five"), ("y", 5)))
    source = JsonLinesSource(str(tmp_path / "rows"), require_success=False)
    with pytest.raises(AirflowFailException, match="lies in the source itself"):
        run.execute(source=source, rejects=str(tmp_path / "rows" / "bad.jsonl"))
    rejects = tmp_path / "bad.jsonl"
    run.execute(source=source, rejects=str(rejects))
    assert run.bodies() == ["y"]
    assert json.loads(rejects.read_text())["delay_seconds"] == "five"


def context_of(run, **more):
    return {**run.context, "ds": "2030-05-06", **more}


def rendered(operator, context):
    """An operator as Airflow's worker renders it."""
    made = operator.prepare_for_execution()
    made.render_template_fields(context)
    return made


def test_fields_are_templates_and_the_dags_own_object_stays_as_it_is(run, database, tmp_path):
    (tmp_path / "late.sql").write_text(
        "SELECT id AS message_id, text AS value, due AS due_at FROM orders\nWHERE id = '{{ params.order }}'"
    )
    source = SqlSource("late.sql", "{{ params.shop }}")
    with DAG("dag", schedule=None, template_searchpath=[str(tmp_path)]):
        operator = DelayedSendOperator(task_id="send", conn_id="recorder", destination="mail", source=source)
        by_clock(operator, lambda: run.now)
    for order in ("order-2", "order-0"):
        run.try_number += 1
        made = rendered(operator, context_of(run, params={"order": order, "shop": "shop"}))
        made.execute(run.context)
    assert run.ids() == ["order-2", "order-0"]
    assert (source.sql, operator.source.sql, operator.source.conn_id) == ("late.sql", "late.sql", "{{ params.shop }}")


def test_only_the_query_may_be_a_file(run, database, tmp_path):
    (tmp_path / "it's late.sql").write_text(
        "SELECT id AS message_id, text AS value, due AS due_at FROM orders WHERE id IN (?, '{{ params.order }}')"
    )
    source = SqlSource("it's late.sql", "shop", parameters=["{{ params.none }}.sql"])
    with DAG("dag", schedule=None, template_searchpath=[str(tmp_path)]):
        operator = DelayedSendOperator(
            task_id="send", conn_id="recorder", destination="{{ params.queue }}.sql", tag="report.sql", source=source
        )
        by_clock(operator, lambda: run.now)
    run.transport.destinations.add("mail.sql")
    made = rendered(operator, context_of(run, params={"order": "order-2", "none": "x", "queue": "mail"}))
    made.execute(run.context)
    (message,) = run.transport.sent
    assert (message.message_id, message.destination, message.tag) == ("order-2", "mail.sql", "report.sql")


def test_another_tasks_result_in_a_source_comes_first_and_is_used(run, database):
    with DAG("dag", schedule=None):

        @task
        def which():
            return "order-1"

        choice = which()
        source = SqlSource(
            "SELECT text AS value, due AS due_at FROM orders WHERE id = :id", "shop", parameters={"id": choice}
        )
        operator = DelayedSendOperator(task_id="send", conn_id="recorder", destination="mail", source=source)
        by_clock(operator, lambda: run.now)
    assert operator.upstream_task_ids == {"which"}
    run.try_number = 1
    context = context_of(run)
    context["ti"].xcom_pull = lambda **_: "order-1"
    rendered(operator, context).execute(context)
    assert run.bodies() == ["body 1"]


def test_the_ui_shows_the_query_and_no_parameters():
    source = SqlSource("SELECT {{ ds }}", "shop", parameters={"password": "hush"})
    assert source.serialize() == {"source": "SqlSource", "sql": "SELECT {{ ds }}", "conn_id": "shop"}
    assert ParquetSource("/rows").serialize() == {"source": "ParquetSource", "path": "/rows"}


def forms_of(path):
    """A local file as its path may be written."""
    return [str(path), path, ObjectStoragePath(f"file://{path}"), ObjectStoragePath(str(path))]


@pytest.mark.parametrize("form", range(4), ids=["text", "Path", "ObjectStoragePath", "without a scheme"])
def test_a_path_may_be_an_object(run, tmp_path, form):
    rows, rejects = tmp_path / "{{ ds }}" / "rows.jsonl", tmp_path / "rejects.jsonl"
    (tmp_path / "2030-05-06").mkdir()
    (tmp_path / "2030-05-06" / "rows.jsonl").write_text(lines(("x", "five"), ("y", 5)))
    own = {"rejects": forms_of(rejects)[form]}
    for source in (
        forms_of(rows)[form],
        JsonLinesSource(forms_of(rows)[form]),
    ):
        operator = run.task(source=source, **own)
        run.try_number += 1
        made = rendered(operator, context_of(run))
        made.execute(run.context)
        run.states.clear()
        for field in ("source", "rejects"):
            shown = serialize_template_field(getattr(made, field), field)
            assert "object at" not in str(shown)
    assert run.bodies() == ["y", "y"]
    assert json.loads(rejects.read_text())["delay_seconds"] == "five"


def test_a_path_object_keeps_its_connection_and_lineage():
    path = ObjectStoragePath("s3://bucket/{{ ds }}/key", conn_id="lake")
    assert ParquetSource(path).serialize() == {"source": "ParquetSource", "path": "s3://lake@bucket/{{ ds }}/key"}
    assert ParquetSource(path).inputs() == [("s3://bucket", "{{ ds }}/key")]


@pytest.mark.parametrize("make", [lambda path: path, ParquetSource], ids=["source=", "ParquetSource"])
def test_a_path_object_with_options_of_its_own_is_refused(run, make):
    with pytest.raises(SourceError, match=r"has anon= for its file system.*put them into an Airflow connection"):
        run.task(source=make(ObjectStoragePath("s3://bucket/key", anon=True)))


def test_path_objects_of_other_tasks_and_of_mapped_ones(run, tmp_path, run_dag):
    for name in "abcd":
        (tmp_path / f"{name}.jsonl").write_text(lines((name, 5)))
    common = {"conn_id": "recorder", "destination": "mail"}
    with DAG("paths", schedule=None) as dag:

        @task
        def one():
            return ObjectStoragePath(f"file://{tmp_path}/a.jsonl")

        @task
        def several():
            return [ObjectStoragePath(f"file://{tmp_path}/{name}.jsonl") for name in "ab"]

        DelayedSendOperator(task_id="result", source=one(), **common)
        DelayedSendOperator(task_id="result_in_object", source=JsonLinesSource(one()), **common)
        DelayedSendOperator.partial(task_id="results", **common).expand(source=several())
        last = tmp_path / "d.jsonl"
        literals = [tmp_path / "c.jsonl", ObjectStoragePath(f"file://{last}"), JsonLinesSource(last)]
        DelayedSendOperator.partial(task_id="literals", **common).expand(source=literals)
        by_destination = DelayedSendOperator.partial(task_id="partial", conn_id="recorder", source=tmp_path / "c.jsonl")
        by_destination.expand(destination=["mail"])
    assert run_dag(dag).state == "success"
    assert sorted(run.bodies()) == sorted(["a", "a", "a", "b", "c", "d", "d", "c"])


def test_a_mapped_tasks_source_is_the_same_each_time_that_the_dag_is_parsed():
    def parsed():
        with DAG("mapped", schedule=None) as dag:
            sources = [JsonLinesSource("/rows.jsonl"), SqlSource("SELECT 1", "shop", parameters=["hush"])]
            DelayedSendOperator.partial(task_id="send", conn_id="c").expand(source=sources)
        return str(DagSerialization.to_dict(dag)["dag"]["tasks"])

    assert parsed() == parsed()
    assert "hush" not in parsed()
