"""What a DAG author writes, run as Airflow runs it; the transport is a queue table, which needs no broker."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from datetime import timedelta

import pytest
from airflow.sdk import DAG, Asset, AssetAlias, task

from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator


class Database:
    """The SQLite file behind a connection, as an operator's console sees it."""

    def __init__(self, path):
        self.path = path

    def rows(self, statement):
        with closing(sqlite3.connect(self.path)) as connection:
            return connection.execute(statement).fetchall()

    def bodies(self, table):
        return sorted(bytes(body) for (body,) in self.rows(f'SELECT "Body" FROM "{table}"'))


@pytest.fixture
def database(tmp_path, connect):
    path = tmp_path / "messages.db"
    connect("reminders_db", conn_type="sqlite", host=str(path))
    return Database(path)


def install(*queues):
    return TopologyInstallOperator(
        task_id="install", conn_id="reminders_db", destinations=list(queues), create_destinations=True
    )


def dispatch():
    return StoreDispatchOperator(task_id="dispatch", store_conn_id="reminders_db", deliver_conn_ids=["reminders_db"])


def states(run):
    return {
        ti.task_id + (f"[{ti.map_index}]" if ti.map_index >= 0 else ""): ti.state for ti in run.get_task_instances()
    }


def test_install_send_dispatch(database, run_dag):
    with DAG("sql", schedule=None) as dag:
        due = [{"value": "now", "delay_seconds": 0}, {"value": "later", "delay_seconds": 3600}]
        send = DelayedSendOperator(task_id="send", conn_id="reminders_db", destination="mail", messages=due)
        install("mail") >> send >> dispatch()
    run = run_dag(dag)
    assert set(states(run).values()) == {"success"}
    assert database.bodies("mail") == [b"now"]
    assert database.rows('SELECT "State" FROM delayed_messages') == [(b"later",)]


def test_messages_from_another_task_are_expanded_and_shown_in_no_template(database, run_dag):
    with DAG("mapped", schedule=None) as dag:

        @task
        def compute():
            return [[{"value": f"secret {queue}", "delay_seconds": 0, "destination": queue}] for queue in ("a", "b")]

        batches = compute()
        send = DelayedSendOperator.partial(task_id="send", conn_id="reminders_db").expand(messages=batches)
        install("a", "b") >> batches
        send >> dispatch()
    run = run_dag(dag)
    assert states(run)["send[0]"] == states(run)["send[1]"] == "success"
    assert (database.bodies("a"), database.bodies("b")) == ([b"secret a"], [b"secret b"])
    assert "secret" not in rendered(run)


def test_xcom_as_messages_makes_its_task_come_first(database, run_dag):
    with DAG("xcom", schedule=None) as dag:

        @task
        def compute():
            return [{"value": "secret", "delay_seconds": 0}]

        send = DelayedSendOperator(
            task_id="send", conn_id="reminders_db", destination="{{ params.queue }}", messages=compute()
        )
        install("mail") >> send >> dispatch()
    dag.params["queue"] = "mail"
    assert dag.get_task("send").upstream_task_ids == {"compute", "install"}
    run = run_dag(dag)
    assert database.bodies("mail") == [b"secret"]
    assert "secret" not in rendered(run)


def test_body_that_another_task_returned_is_no_template(database, run_dag):
    with DAG("no_template", schedule=None) as dag:

        @task
        def compute():
            return ["{{ 1 + 1 }}", "broken {{ x"]

        send = DelayedSendOperator.partial(
            task_id="send", conn_id="reminders_db", destination="{{ params.queue }}", delay=0
        ).expand(value=compute())
        install("mail") >> send >> dispatch()
    dag.params["queue"] = "mail"
    assert states(run_dag(dag))["dispatch"] == "success"
    assert database.bodies("mail") == [b"broken {{ x", b"{{ 1 + 1 }}"]


def test_body_that_the_author_wrote_is_a_template_also_in_partial_and_expand(database, run_dag):
    with DAG("template", schedule=None) as dag:
        send = DelayedSendOperator.partial(
            task_id="send", conn_id="reminders_db", value="for {{ params.who }}", delay=0
        ).expand(destination=["a", "b"])
        expanded = DelayedSendOperator.partial(task_id="expanded", conn_id="reminders_db", destination="c", delay=0)
        each = DelayedSendOperator.partial(task_id="each", conn_id="reminders_db", destination="d", delay=0)
        sends = [
            send,
            expanded.expand(value=["one for {{ params.who }}", "two"]),
            each.expand_kwargs([{"value": "{{ params.who }} again"}]),
        ]
        install("a", "b", "c", "d") >> sends >> dispatch()
    dag.params["who"] = "you"
    assert states(run_dag(dag))["dispatch"] == "success"
    assert (database.bodies("a"), database.bodies("b")) == ([b"for you"], [b"for you"])
    assert sorted(database.bodies("c")) == [b"one for you", b"two"]
    assert database.bodies("d") == [b"you again"]


HEADERS = {"token": "hush {{ params.who }}", "kind": "hush"}


def rendered_headers(run):
    return {name: fields["headers"] for name, fields in rendered_fields(run).items() if "headers" in fields}


def test_values_of_headers_are_rendered_and_not_shown(database, run_dag):
    def sends():
        @task
        def compute():
            return {"token": "hush {{ 1 }}"}

        common = {"conn_id": "reminders_db", "value": "x", "delay": 0}
        yield DelayedSendOperator(task_id="plain", headers=HEADERS, destination="plain", **common)
        yield DelayedSendOperator(task_id="returned", headers=compute(), destination="returned", **common)
        mapped = DelayedSendOperator.partial(task_id="partial", headers=HEADERS, **common)
        yield mapped.expand(destination=["partial"])
        mapped = DelayedSendOperator.partial(task_id="expanded", destination="expanded", **common)
        yield mapped.expand(headers=[HEADERS])

    queues = ("plain", "returned", "partial", "expanded")
    with DAG("headers", schedule=None) as dag:
        install(*queues) >> list(sends()) >> dispatch()
    # what another task returns makes it come first
    assert dag.get_task("returned").upstream_task_ids == {"compute", "install"}
    # again in one process, with other parameters
    for who in ("you", "them"):
        dag.params["who"] = who
        run = run_dag(dag)
        assert set(states(run).values()) == {"success"}
        hidden, shown = {"token": "***", "kind": "***"}, {"token": f"hush {who}", "kind": "hush"}
        found = rendered_headers(run)
        assert {name: found[name] for name in queues if name != "returned"} == {
            **dict.fromkeys(("plain", "partial", "expanded"), hidden),
        }
        assert found["returned"] == {"token": "***"}
        for queue in queues:
            sent = [json.loads(headers) for (headers,) in database.rows(f'SELECT "Headers" FROM "{queue}"')]
            wanted = {"token": "hush {{ 1 }}"} if queue == "returned" else shown
            assert wanted.items() <= sent[-1].items()


def rendered(run):
    return repr(rendered_fields(run))


def rendered_fields(run):
    from airflow.models.renderedtifields import RenderedTaskInstanceFields
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session() as session:
        stored_fields = session.scalars(
            select(RenderedTaskInstanceFields).where(RenderedTaskInstanceFields.run_id == run.run_id)
        )
        fields = {row.task_id: row.rendered_fields for row in stored_fields}
    assert fields
    return fields


class DiesAfterSending(DelayedSendOperator):
    """Its first try is lost after all was sent, as when the worker is killed before it could say so."""

    tries = 0

    def execute(self, context):
        DiesAfterSending.tries += 1
        summary = super().execute(context)
        if DiesAfterSending.tries == 1:
            raise RuntimeError("the worker was killed")
        return summary


def test_retry_after_a_fault_repeats_nothing_in_the_store(database, run_dag, monkeypatch):
    monkeypatch.setattr(DiesAfterSending, "tries", 0)
    with DAG("again", schedule=None) as dag:
        due = [{"value": str(number), "delay_seconds": 3600 + number} for number in range(20)]
        send = DiesAfterSending(
            task_id="send",
            conn_id="reminders_db",
            destination="mail",
            messages=due,
            retries=1,
            retry_delay=timedelta(0),
        )
        install("mail") >> send
    run = run_dag(dag)
    assert DiesAfterSending.tries == 2
    assert states(run)["send"] == "success"
    assert database.rows("SELECT count(*) FROM delayed_messages") == [(20,)]
    (ti,) = (ti for ti in run.get_task_instances() if ti.task_id == "send")
    summary = ti.xcom_pull(task_ids="send")
    assert (summary["stored"], summary["earlier_tries"]) == (20, 20)


def test_bad_input_fails_without_a_retry_and_sends_nothing(database, run_dag):
    with DAG("bad", schedule=None) as dag:
        due = [{"value": "good", "delay_seconds": 0}, {"value": "bad", "delay_seconds": -5}]
        send = DelayedSendOperator(task_id="send", conn_id="reminders_db", destination="mail", messages=due, retries=3)
        install("mail") >> send >> dispatch()
    run = run_dag(dag)
    assert states(run)["send"] == "failed"
    assert database.rows("SELECT count(*) FROM delayed_messages") == [(0,)]


def test_outlets_tell_what_was_sent_and_no_body(database, run_dag):
    sent = Asset("reminders")
    with DAG("outlets", schedule=None) as dag:
        due = [
            {"value": "secret", "delay_seconds": 60 * number, "destination": name} for number, name in enumerate("aab")
        ]
        send = DelayedSendOperator(
            task_id="send",
            conn_id="reminders_db",
            messages=due,
            headers={"h": "hidden"},
            outlets=[sent, AssetAlias("any"), Asset.ref(name="reminders")],
        )
        install("a", "b") >> send
    run = run_dag(dag)
    (ti,) = (ti for ti in run.get_task_instances() if ti.task_id == "send")
    summary = ti.xcom_pull(task_ids="send")
    extras = events_of(run)
    # ids are for who may cancel by them, and not for all who may see assets
    assert len(summary.pop("message_ids")) == 3
    assert "message_ids" not in extras[0]
    assert {name: extras[0][name] for name in summary} == summary
    assert extras[0]["stored"] == 3
    assert extras[0]["destinations"] == {"a": 2, "b": 1}
    assert extras[0]["conn_id"] == "reminders_db"
    assert not any(word in repr(extras) for word in ("secret", "hidden"))


def events_of(run):
    from airflow.models.asset import AssetEvent
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session() as session:
        return [event.extra for event in session.scalars(select(AssetEvent).filter_by(source_run_id=run.run_id))]
