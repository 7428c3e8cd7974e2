"""The code of the pages for a start is run as it stands."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from urllib.parse import quote

import pytest
from support import consuming, pages
from support.examples import note_dags

from airflow_delayed.message import DelayedMessage, utcnow

pytestmark = pytest.mark.long


def code_blocks(here):
    """The Python of the two pages whose blocks stand alone."""
    found = [pages.blocks(here / f"docs/start/{name}.md") for name in ("dags", "consumers")]
    return [text for one in found for language, text in one if language == "python"]


def block_with(here, text):
    (found,) = (block for block in code_blocks(here) if text in block)
    return found


def dags_of(block):
    with pytest.MonkeyPatch.context() as patch:
        made = note_dags(patch)
        exec("from airflow.sdk import DAG\n" + block, {})
    return {dag.dag_id: dag for dag in made}


def test_sqs_dags_are_dags(here):
    dags = dags_of(block_with(here, "remind_by_sqs"))
    assert {name: list(dag.task_ids) for name, dag in dags.items()} == {
        "remind_by_sqs": ["send"],
        "dispatch_reminders": ["dispatch"],
    }


def test_rabbitmq_dag_runs(here, rabbitmq_url, connect, run_dag):
    connect("rabbitmq_default", rabbitmq_url.replace("amqp://", "rabbitmq://"))
    (dag,) = dags_of(block_with(here, "remind_by_rabbitmq")).values()
    assert {ti.state for ti in run_dag(dag).get_task_instances()} == {"success"}


def test_sql_dag_runs(here, tmp_path, connect, run_dag):
    import sqlite3

    connect("reminders_db", conn_type="sqlite", host=str(tmp_path / "messages.db"))
    block = block_with(here, "remind_by_sql")
    assert '"delay_seconds": 60' in block
    remind, deliver = dags_of(block.replace('"delay_seconds": 60', '"delay_seconds": 0')).values()
    assert {ti.state for ti in run_dag(remind).get_task_instances()} == {"success"}
    with contextlib.closing(sqlite3.connect(tmp_path / "messages.db")) as database:
        assert database.execute("SELECT count(*) FROM delayed_messages").fetchone() == (2,)
        # what is due "soon" does not wait for the DAG's next run: the dispatcher stays
        (dispatch,) = deliver.tasks
        assert (deliver.schedule, dispatch.until, dispatch.deferrable) == ("@continuous", timedelta(hours=6), True)
        dispatch.until = timedelta(seconds=1)
        assert run_dag(deliver).state == "success"
        assert database.execute("SELECT body FROM reminders").fetchall() == [(b"soon",)]
        assert database.execute("SELECT count(*) FROM delayed_messages").fetchone() == (1,)


def test_consumer_of_a_table_in_sqlite(here, tmp_path, connect, capsys):
    import sqlite3

    from airflow_delayed.hooks.store import DelayedStoreHook
    from airflow_delayed.operators.dispatch import StoreDispatchOperator

    file = tmp_path / "messages.db"
    connect("reminders_db", conn_type="sqlite", host=str(file))
    with contextlib.closing(DelayedStoreHook("reminders_db")) as store:
        store.install(["reminders"], create_destinations=True)
        due = utcnow() - timedelta(seconds=10)
        store.send(
            DelayedMessage(
                destination="reminders", body=b"tea", due_at=due + timedelta(seconds=number), message_id=name
            )
            for number, name in enumerate(["first", "second"])
        )
    StoreDispatchOperator(task_id="dispatch", store_conn_id="reminders_db", deliver_conn_ids=["reminders_db"]).execute(
        {}
    )
    with contextlib.closing(sqlite3.connect(file)) as database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(reminders)")]
        page = (here / "docs/start/consumers.md").read_text()
        assert all(f"`{column}`" in page for column in columns)
        capsys.readouterr()
        exec(block_with(here, "BEGIN IMMEDIATE").replace("/tmp/delayed.db", str(file)), {})
        assert capsys.readouterr().out.splitlines()[-2:] == ["first tea", "second tea"]
        assert database.execute("SELECT count(*) FROM reminders").fetchone() == (0,)


def test_changing_ones_mind(here, tmp_path, connect, capsys):
    from airflow_delayed.hooks.store import DelayedStoreHook

    connect("reminders_db", conn_type="sqlite", host=str(tmp_path / "messages.db"))
    store = DelayedStoreHook("reminders_db", "aws_default")
    store.install([])
    soon = utcnow() + timedelta(hours=1)
    tags = {"flight-1": None, "flight-3": "customer-7", "flight-4": "customer-9"}
    store.send(
        DelayedMessage(destination="reminders", body=b"", due_at=soon, message_id=name, tag=tag)
        for name, tag in tags.items()
    )
    exec(block_with(here, "store.cancel"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[0] == "flight-3"
    assert second == "{'flight-1': 'cancelled', 'flight-2': 'absent'}"
    left = {message.message_id: message.due_at for message in store.list()}
    assert left.keys() == {"flight-3"}
    assert left["flight-3"] > soon + timedelta(hours=22)
    store.close()


def test_a_consumer_of_sqs_does_its_work_once(here, clocked_server, monkeypatch, connect):
    # not on a server of the user's own, who may have such a queue
    sqs_endpoint = clocked_server.url
    for name, value in {
        "AWS_ENDPOINT_URL": sqs_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    connect("docs_sqs", f"aws://test:test@/?region_name=us-east-1&endpoint_url={quote(sqs_endpoint, safe='')}")
    from airflow_delayed.hooks.sqs import SqsDelayHook

    hook = SqsDelayHook("docs_sqs")
    hook.install(["reminders"], create_destinations=True)
    due = utcnow() - timedelta(seconds=1)
    sent = [
        DelayedMessage(destination="reminders", body=f"flight {number}".encode(), due_at=due, message_id=f"id-{number}")
        for number in range(12)
    ]
    hook.send(sent)
    hook.send(sent[:5])
    with contextlib.closing(consuming.connected(":memory:")) as database:
        consuming.tables(database)
        block = consuming.code("receive_message", database)
        assert "WaitTimeSeconds=20" in block
        block = block.replace("import boto3, psycopg", "import boto3")
        exec(block.replace("WaitTimeSeconds=20", "WaitTimeSeconds=1, MaxNumberOfMessages=10"), {"database": database})
        done = sorted(text for (text,) in database.execute("SELECT text FROM reminded"))
    assert done == sorted(message.body.decode() for message in sent)
