"""StoreDispatchOperator, through the brokers that it hands over to."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from support.rabbitmq import virtual_host
from support.sqs import World
from support.stores import Store, message, store_fixture  # noqa: F401 - a fixture

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.store.report import DispatchFailed
from services import sqs

SECOND = timedelta(seconds=1)


def operator(store: Store, **options) -> StoreDispatchOperator:
    return StoreDispatchOperator(**{"task_id": "dispatch", "conn_id": store.conn_id, "schema": store.schema, **options})


@pytest.mark.parametrize(
    "options, text",
    [
        ({"lookahead": -SECOND}, "lookahead=.* is negative"),
        ({"until": "done"}, "until='done' must be None, for one pass, or 'empty'"),
        ({"batch_size": 0}, "batch_size=0 must be 1 or more"),
    ],
)
def test_what_cannot_be_is_an_error_when_the_dag_is_read(options, text):
    with pytest.raises(ValueError, match=text):
        StoreDispatchOperator(task_id="dispatch", conn_id="store", deliver_conn_ids="broker", **options)


def test_its_names_are_templates():
    task = StoreDispatchOperator(
        task_id="d",
        conn_id="{{ x }}_store",
        deliver_conn_ids=["{{ x }}_broker"],
        table="{{ x }}_table",
        schema="{{ x }}_schema",
    )
    task.render_template_fields({"x": "a"})
    assert (task.conn_id, task.deliver_conn_ids) == ("a_store", ["a_broker"])
    assert (task.table, task.schema) == ("a_table", "a_schema")


def test_its_summary_has_counts_and_no_content(store: Store, caplog):
    hook = store.installed("q", deliver_conn_id=None)
    due = hook.now() - SECOND
    hook.send([message("a", due, headers={"secret": "hush"}), message("b", due + 3600 * SECOND)])
    store.hook("broker").send([message("c", due)])
    summary = operator(store, deliver_conn_ids=store.conn_id).execute({})
    assert summary == {
        "dispatched": 1,
        "failed": 0,
        "expired": 0,
        "left_for_others": 1,
        "by_connection": {store.conn_id: 1},
        "first_due": due.isoformat(),
        "last_due": due.isoformat(),
    }
    assert "'dispatched': 1" in caplog.text
    for hidden in ("body of", "hush"):
        assert hidden not in caplog.text + json.dumps(summary)


def test_what_fails_fails_the_task_after_the_others(store: Store):
    hook = store.installed("q", deliver_conn_id=None)
    hook.send([message("a", hook.now(), destination="gone"), message("b", hook.now())])
    with pytest.raises(
        DispatchFailed, match=r"1 messages were handed over, 1 failed.*message a: there is no table 'gone'"
    ):
        operator(store, deliver_conn_ids=[store.conn_id]).execute({})
    assert len(store.rows(hook, "q")) == 1


def test_through_rabbitmq(store: Store, rabbitmq_url, connect):
    with virtual_host(rabbitmq_url) as vhost:
        connect("broker", **vhost.connection)
        RabbitMQDelayHook("broker").install(["q"], create_destinations=True)
        hook = store.installed()
        now = hook.now()
        hook.send(message(f"m{n}", now + n * SECOND / 10) for n in range(30))
        # a queue that is not there, among the others, and one message for later
        hook.send([message("bad", now + SECOND, destination="gone"), message("later", now + 3600 * SECOND)])
        with pytest.raises(DispatchFailed) as caught:
            operator(store, deliver_conn_ids=["broker"]).execute({})
        assert list(caught.value.failures) == ["bad"]
        assert caught.value.report.by_connection == {"broker": 30}
        assert store.failures_of(hook) == {"bad": 1, "later": 0}
        arrivals = vhost.collect("q", enough=30)
        assert sorted(one.message_id for one in arrivals) == sorted(f"m{n}" for n in range(30))
        assert all(one.received_at >= now + int(one.message_id[1:]) * SECOND / 10 for one in arrivals)


def test_through_sqs(store: Store, sqs_endpoint, connect):
    connect("broker", **sqs.connection(sqs_endpoint, unrestricted_delay=True))
    world = World(sqs_endpoint, "broker").install()
    hook = store.installed()
    now = hook.now()
    dues = {"past": -5, "soon": 2, "in-time": 869, "too-early": 890}
    hook.send(message(name, now + due * SECOND, destination=world.destination) for name, due in dues.items())
    hook.send([message("bad", now, destination="gone")])
    with pytest.raises(DispatchFailed) as caught:
        operator(store, deliver_conn_ids=["broker"], lookahead=3600 * SECOND).execute({})
    assert list(caught.value.failures) == ["bad"]
    assert caught.value.report.dispatched == 3
    # the delay FIFO is never used, so what is beyond the horizon stays
    assert store.failures_of(hook) == {"bad": 1, "too-early": 0}
    assert world.hook.waiting(world.destination) == 0


@pytest.mark.parametrize("kind", ["rabbitmq", "aws"])
def test_a_broker_that_is_down(store: Store, connect, kind):
    from services.process import free_port

    if kind == "aws":
        connect("broker", **sqs.connection(f"http://127.0.0.1:{free_port()}"))
    else:
        connect("broker", conn_type="rabbitmq", host="127.0.0.1", port=free_port(), login="u", password="hush")
    hook = store.installed()
    hook.send([message("a", hook.now() - SECOND)])
    with pytest.raises(DispatchFailed, match="connection 'broker' is not available") as caught:
        operator(store, deliver_conn_ids="broker").execute({})
    assert "hush" not in str(caught.value)
    assert caught.value.failures == {}
    assert store.failures_of(hook) == {"a": 0}


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_the_readmes_consumer_of_a_queue_table(store: Store, postgres_url, capsys, here, monkeypatch):
    """It does its work in the transaction that takes the message, so that nothing is done twice."""
    import re

    hook = store.installed("reminders", deliver_conn_id=None)
    hook.send(message(f"m{n}", hook.now() - SECOND + n * SECOND / 100, destination="reminders") for n in range(5))
    operator(store, deliver_conn_ids=store.conn_id).execute({})
    capsys.readouterr()
    (code,) = re.findall(r"```python\n(import json, psycopg.*?)```", (here / "README.md").read_text(), re.DOTALL)
    with monkeypatch.context() as only_here:
        schema = store.schema.replace('"', '""').replace(" ", r"\ ")
        only_here.setenv("PGOPTIONS", f'-c search_path="{schema}"')
        exec(code.replace("postgresql://localhost/reminders", postgres_url), {})
    assert capsys.readouterr().out.splitlines() == [f"m{n} body of m{n}" for n in range(5)]
    assert store.rows(hook, "reminders") == []
