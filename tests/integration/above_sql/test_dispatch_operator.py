"""StoreDispatchOperator, through the brokers that it dispatches to."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from support.rabbitmq import VirtualHost
from support.sqs import World
from support.stores import Store, Transport, message, on_postgres_too

from airflow_delayed.operators import reporting
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.store.dispatch.report import DispatchFailed
from services import sqs

SECOND = timedelta(seconds=1)


def operator(store: Store, **options) -> StoreDispatchOperator:
    return StoreDispatchOperator(
        **{"task_id": "dispatch", "store_conn_id": store.conn_id, "schema": store.schema, **options}
    )


@pytest.mark.parametrize(
    "options, text",
    [
        ({"lookahead": -SECOND}, "lookahead=.* is negative"),
        ({"until": "done"}, "until='done' must be None, for one pass, or 'empty'"),
        ({"until": timedelta(0)}, "until=.* a timedelta above 0"),
        ({"deliver_conn_ids": []}, "deliver_conn_ids is empty"),
        ({"number_of_retries": -1}, "number_of_retries=-1 must be 0 or more"),
        ({"max_rate": 0}, "max_rate=0 must be from 0.000001 to 1,000,000 messages a second, or None"),
        ({"max_rate": 1e-300}, "max_rate=1e-300 must be from 0.000001"),
        ({"max_rate": float("inf")}, "max_rate=inf must be from 0.000001"),
        ({"max_rate": float("nan")}, "max_rate=nan must be from 0.000001"),
        ({"allowed_destinations": []}, "allowed_destinations is empty"),
        ({"allowed_destinations": ["q", ""]}, "allowed_destinations is empty, or has an empty name"),
        ({"claim_timeout": SECOND / 2}, "claim_timeout=.* must be a second or more"),
        ({"remember": -SECOND}, "remember=.* must not be negative"),
        ({"give_up_after": -SECOND}, "give_up_after=.* must not be negative"),
        ({"error_destination": ""}, "error_destination is empty"),
        ({"batch_size": 0}, "batch_size=0 must be 1 or more"),
    ],
)
def test_what_cannot_be_is_an_error_when_the_dag_is_read(options, text):
    with pytest.raises(ValueError, match=text):
        StoreDispatchOperator(
            **{"task_id": "dispatch", "store_conn_id": "store", "deliver_conn_ids": "broker", **options}
        )


def test_its_names_are_templates():
    task = StoreDispatchOperator(
        task_id="d",
        store_conn_id="{{ x }}_store",
        deliver_conn_ids=["{{ x }}_broker"],
        table="{{ x }}_table",
        schema="{{ x }}_schema",
        allowed_destinations=["{{ x }}-*"],
    )
    task.render_template_fields({"x": "a"})
    assert task.allowed_destinations == ["a-*"]
    assert (task.store_conn_id, task.deliver_conn_ids) == ("a_store", ["a_broker"])
    assert (task.table, task.schema) == ("a_table", "a_schema")


@on_postgres_too
def test_its_summary_has_counts_and_no_content(store: Store, caplog):
    hook = store.installed("q", deliver_conn_id=None)
    due = hook.now() - SECOND
    hook.send([message("a", due, headers={"secret": "hush"}), message("b", due + 3600 * SECOND)])
    store.hook("broker").send([message("c", due)])
    summary = operator(store, deliver_conn_ids=store.conn_id).execute({})
    assert summary == {
        "dispatched": 1,
        "retried": 0,
        "failed": 0,
        "expired": 0,
        "error_destination": 0,
        "forgotten": 0,
        "left_to_others": 1,
        "by_connection": {store.conn_id: 1},
        "first_due": due.isoformat(),
        "last_due": due.isoformat(),
    }
    done = f"1 messages dispatched ({store.conn_id}: 1), due from {due.isoformat()} to {due.isoformat()}"
    assert f"store {store.conn_id!r}: {done}; 1 left to other dispatchers\n" in caplog.text
    for hidden in ("body of", "hush"):
        assert hidden not in caplog.text + json.dumps(summary)


def test_what_fails_fails_the_task_after_the_others(store: Store):
    hook = store.installed("q", deliver_conn_id=None)
    hook.send([message("a", hook.now(), destination="gone"), message("b", hook.now())])
    # a retry of the task would find nothing to do, and pass for a success
    with pytest.raises(
        AirflowFailException, match=r"1 messages were dispatched, 1 failed.*message a: there is no table 'gone'"
    ):
        operator(store, deliver_conn_ids=[store.conn_id]).execute({})
    assert len(store.rows(hook, "q")) == 1
    assert set(store.given_up(hook)) == {"a"}


@on_postgres_too
def test_a_row_reaches_allowed_destinations_alone(store: Store, monkeypatch):
    """Whoever may insert into the store's table says where a message goes; who dispatches says where it may."""
    transport = Transport()
    monkeypatch.setattr("airflow_delayed.operators.dispatch.delivery_for", lambda conn_id, clock: transport)
    hook = store.installed("reminders", "admin", deliver_conn_id=None)
    names = ["reminders", "billing-1", "admin", "Reminders", "billing", "re*"]
    hook.send(message(f"own-{name}", hook.now() - SECOND, destination=name) for name in ("reminders", "admin"))
    store.hook("broker").send(message(name, hook.now() - SECOND, destination=name) for name in names)
    task = operator(
        store, deliver_conn_ids=["broker", store.conn_id], allowed_destinations=["{{ x }}", "billing-[0-9]"]
    )
    task.render_template_fields({"x": "reminders"})
    with pytest.raises(AirflowFailException) as caught:
        task.execute({})
    assert sorted(transport.ids) == ["billing-1", "reminders"]
    assert (len(store.rows(hook, "reminders")), store.rows(hook, "admin")) == (1, [])
    refused = {"admin": "admin", "Reminders": "Reminders", "billing": "billing", "re*": "re*", "own-admin": "admin"}
    assert caught.value.__cause__.failures == {
        name: f"destination {destination!r} is not among the allowed_destinations of the dispatcher: reminders;"
        " billing-[0-9]"
        for name, destination in refused.items()
    }
    assert store.given_up(hook).keys() == refused.keys()


def test_what_is_not_allowed_goes_to_the_error_destination_if_there_is_one(store: Store):
    hook = store.installed("admin", "errors", deliver_conn_id=None)
    hook.send([message("a", hook.now() - SECOND, destination="admin")])
    options = {"allowed_destinations": "reminders", "error_destination": "errors"}
    assert operator(store, deliver_conn_ids=store.conn_id, **options).execute({})["error_destination"] == 1
    assert (store.rows(hook, "admin"), len(store.rows(hook, "errors"))) == ([], 1)


def test_what_is_given_up_goes_to_the_error_destination(store: Store, caplog):
    hook = store.installed("q", "errors", deliver_conn_id=None)
    hook.send([message("a", hook.now(), destination="gone", headers={"x": "1"}), message("b", hook.now())])
    summary = operator(store, deliver_conn_ids=[store.conn_id], error_destination="errors").execute({})
    assert (summary["dispatched"], summary["error_destination"], summary["failed"]) == (1, 1, 0)
    ((headers, body),) = store.rows(hook, "errors")
    properties = json.loads(headers)
    assert body == b"body of a"
    assert (properties["x"], properties["NServiceBus.FailedQ"], properties["NServiceBus.MessageId"]) == (
        "1",
        "gone",
        "a",
    )
    assert properties["NServiceBus.ExceptionInfo.Message"].startswith("there is no table 'gone'")
    failed_at = datetime.strptime(properties["NServiceBus.TimeOfFailure"], "%Y-%m-%d %H:%M:%S:%f Z")
    assert abs(failed_at - hook.now().replace(tzinfo=None)) < 60 * SECOND
    assert "1 messages went to the error destination, such as a" in caplog.text
    assert (store.given_up(hook), hook.count()) == ({}, 0)


def run_of(dag: DAG, due: datetime, run_type: str = "scheduled") -> dict[str, object]:
    return {"dag": dag, "dag_run": SimpleNamespace(run_type=run_type, run_after=due)}


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "schedule, options, problem",
    [
        ("*/10 * * * *", {"lookahead": 600 * SECOND}, None),
        ("*/10 * * * *", {"lookahead": 599 * SECOND}, r"lookahead=0:09:59 is shorter than .* the next run, 0:10:00"),
        (timedelta(minutes=10), {"lookahead": 599 * SECOND}, r"shorter than .* the next run, 0:10:00"),
        (timedelta(minutes=10), {"lookahead": 599 * SECOND, "until": SECOND / 1000}, "shorter"),
        (timedelta(seconds=1.5), {"lookahead": SECOND, "until": 0.5 * SECOND}, None),
        (timedelta(minutes=20), {}, "lookahead=0:15:00 is shorter than .* the next run, 0:20:00"),
        # what stays sends when messages are due, but for a fixed lookahead
        (timedelta(minutes=10), {"until": SECOND / 1000}, "until=.* is shorter than .* the next run, 0:10:00"),
        (timedelta(minutes=10), {"lookahead": 600 * SECOND, "until": SECOND / 1000}, None),
        (timedelta(seconds=0.5), {"until": 0.5 * SECOND}, None),
        # each run goes on until nothing is left
        (timedelta(minutes=10), {"lookahead": 0 * SECOND, "until": "empty"}, None),
        # at 17:00 the next run is 16 hours away
        ("0 9,17 * * *", {"lookahead": timedelta(hours=15)}, r"the next run, 16:00:00"),
        ("0 9,17 * * *", {"lookahead": timedelta(hours=16)}, None),
        (timedelta(hours=2), {"lookahead": timedelta(hours=3)}, "no earlier than 1:00:00 before they are due"),
        (None, {"lookahead": 0 * SECOND}, None),
    ],
)
def test_a_lookahead_that_leaves_a_gap_is_an_error(store: Store, monkeypatch, schedule, options, problem):
    """The transport's horizon is an hour, or a day where the lookahead is longer than that."""
    store.installed()
    far = timedelta(days=1) if options.get("lookahead", SECOND) > timedelta(hours=4) else timedelta(hours=1)
    transport = Transport(far, sooner_when_due=True)
    monkeypatch.setattr("airflow_delayed.operators.dispatch.delivery_for", lambda conn_id, clock: transport)
    with DAG("d", schedule=schedule, start_date=datetime(2030, 1, 1, tzinfo=timezone.utc)) as dag:
        task = operator(store, deliver_conn_ids="broker", **options)
    due = datetime(2030, 1, 2, 17, 0, tzinfo=timezone.utc)
    if problem is None or schedule is None:
        task.execute(run_of(dag, due))
        return
    with pytest.raises(AirflowFailException, match=problem):
        task.execute(run_of(dag, due))
    # started by hand: no timetable says when the next one comes
    task.execute(run_of(dag, due, "manual"))


def test_who_holds_messages_is_told_that_nobody_comes_for_them(store: Store, caplog, monkeypatch):
    hook = store.installed("q", deliver_conn_id=None)
    due = hook.now() + 60 * SECOND
    log = logging.getLogger("sender")
    reporting.warn_without_dispatcher(log, hook, store.conn_id, 3, 60 * SECOND)
    assert "3 messages are stored" in caplog.text
    assert "no dispatcher was there within a day" in caplog.text
    operator(store, deliver_conn_ids=store.conn_id).execute({})
    caplog.clear()
    reporting.warn_without_dispatcher(log, hook, store.conn_id, 3, 60 * SECOND)
    reporting.warn_without_dispatcher(log, store.hook("broker"), "broker", 0, 60 * SECOND)
    assert caplog.text == ""
    # a dispatcher of other connections does not count
    reporting.warn_without_dispatcher(log, store.hook("broker"), "broker", 1, 60 * SECOND)
    assert "1 messages are stored for connection 'broker', and no dispatcher" in caplog.text
    caplog.clear()
    reporting.warn_without_dispatcher(log, hook, store.conn_id, 1, timedelta(0))
    assert "the last dispatcher was there at 20" in caplog.text
    assert "deliver_conn_ids stay, with until= and deferrable=True" in caplog.text
    assert due > hook.now()
    caplog.clear()
    # whatever keeps that from being known, the messages are stored
    monkeypatch.setattr(hook, "last_seen", lambda: json.loads("secret"))
    reporting.warn_without_dispatcher(log, hook, store.conn_id, 1, timedelta(0))
    assert "could not be asked for its dispatchers: JSONDecodeError" in caplog.text


def test_a_dag_that_runs_all_the_time_leaves_no_gap(store: Store, caplog):
    hook = store.installed(deliver_conn_id=None)
    with DAG(
        "stay", schedule="@continuous", start_date=datetime(2026, 1, 1, tzinfo=timezone.utc), max_active_runs=1
    ) as dag:
        task = operator(store, deliver_conn_ids=[store.conn_id], lookahead=timedelta(0), until=SECOND / 100)
    run = SimpleNamespace(run_type="scheduled", run_after=hook.now(), run_id="r", data_interval_end=None)
    task.execute({"dag": dag, "dag_run": run})
    assert [record.message for record in caplog.records if "next run" in record.message] == []


@pytest.mark.parametrize("until", [None, 3600 * SECOND])
def test_sigterm_ends_it_in_order(store: Store, monkeypatch, connect, until):
    """As Airflow's task runner does: the signal's handler calls on_kill in the task's thread."""
    hook = store.installed()
    hook.send(message(f"m{n}", hook.now() - SECOND) for n in range(40))

    class Evicted(Transport):
        def send(self, messages):
            report = super().send(messages)
            if signal.getsignal(signal.SIGTERM) != previous:
                os.kill(os.getpid(), signal.SIGTERM)
            return report

    transport = Evicted()
    monkeypatch.setattr("airflow_delayed.operators.dispatch.delivery_for", lambda conn_id, clock: transport)
    task = operator(store, deliver_conn_ids=["broker"], until=until, batch_size=2)
    task.on_kill()
    previous = signal.signal(signal.SIGTERM, lambda number, frame: task.on_kill())
    try:
        with pytest.raises(AirflowException, match="next try or run dispatches"):
            task.execute({})
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert 0 < len(transport.ids) < 40
    assert hook.count() == 40 - len(transport.ids)
    assert store.leased(hook) == set()
    assert [one.ended_at is None for one in hook.dispatchers()] == [False]
    operator(store, deliver_conn_ids=["broker"]).execute({})
    assert sorted(transport.ids) == sorted(f"m{n}" for n in range(40))


def test_through_rabbitmq(store: Store, vhost: VirtualHost, connect):
    connect("broker", **vhost.connection)
    vhost.declare("q")
    hook = store.installed()
    now = hook.now()
    hook.send(message(f"m{n}", now + n * SECOND / 10) for n in range(30))
    # a queue that is not there, among the others, and one message for later
    hook.send([message("bad", now + SECOND, destination="gone"), message("later", now + 3600 * SECOND)])
    with pytest.raises(AirflowFailException) as caught:
        operator(store, deliver_conn_ids=["broker"]).execute({})
    assert list(caught.value.__cause__.failures) == ["bad"]
    assert caught.value.__cause__.report.by_connection == {"broker": 30}
    assert store.failures_of(hook) == {"later": 0}
    assert set(store.given_up(hook)) == {"bad"}
    arrivals = vhost.collect("q", enough=30)
    assert sorted(one.message_id for one in arrivals) == sorted(f"m{n}" for n in range(30))
    assert all(one.received_at >= now + int(one.message_id[1:]) * SECOND / 10 for one in arrivals)


def test_through_sqs(store: Store, sqs_endpoint, connect):
    connect("broker", **sqs.connection(sqs_endpoint, unrestricted_delay=True))
    world = World(sqs_endpoint, "broker").install()
    hook = store.installed()
    now = hook.now()
    dues = {"past": -5, "soon": 2, "in-time": 869, "too-early": 990}
    hook.send(message(name, now + due * SECOND, destination=world.destination) for name, due in dues.items())
    hook.send([message("bad", now, destination="gone")])
    with pytest.raises(AirflowFailException) as caught:
        operator(store, deliver_conn_ids=["broker"], lookahead=3600 * SECOND).execute({})
    assert list(caught.value.__cause__.failures) == ["bad"]
    assert caught.value.__cause__.report.dispatched == 3
    # the delay FIFO is never used, so what is beyond the horizon stays
    assert store.failures_of(hook) == {"too-early": 0}
    assert world.hook.waiting(world.destination) == 0


@pytest.mark.parametrize("kind", ["rabbitmq", "aws"])
def test_a_broker_that_is_down(store: Store, connect, kind, monkeypatch):
    from services.process import free_port

    if kind == "aws":
        # by default boto3 tries for a quarter of a minute before its error is seen here
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
        connect("broker", **sqs.connection(f"http://127.0.0.1:{free_port()}"))
    else:
        connect("broker", conn_type="rabbitmq", host="127.0.0.1", port=free_port(), login="u", password="hush")
    hook = store.installed()
    hook.send([message("a", hook.now() - SECOND)])
    with pytest.raises(DispatchFailed, match="connection 'broker' is not available") as caught:
        operator(store, deliver_conn_ids="broker", give_up_after=SECOND / 2).execute({})
    assert re.search(r"dispatching has failed since 20.* UTC \(limit 0.5 s\), last with: ", str(caught.value))
    assert "hush" not in str(caught.value)
    assert caught.value.failures == {}
    assert store.failures_of(hook) == {"a": 0}


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_the_consumer_of_a_queue_table_in_the_docs(store: Store, postgres_url, capsys, here, monkeypatch):
    """It does its work in the transaction that takes the message, so that nothing is done twice."""
    import re

    hook = store.installed("reminders", deliver_conn_id=None)
    hook.send(message(f"m{n}", hook.now() - SECOND + n * SECOND / 100, destination="reminders") for n in range(5))
    operator(store, deliver_conn_ids=store.conn_id).execute({})
    capsys.readouterr()
    (code,) = re.findall(
        r"```python\n(import json, psycopg.*?)```", (here / "docs/start/consumers.md").read_text(), re.DOTALL
    )
    with monkeypatch.context() as only_here:
        schema = store.schema.replace('"', '""').replace(" ", r"\ ")
        only_here.setenv("PGOPTIONS", f'-c search_path="{schema}"')
        exec(code.replace("postgresql://localhost/reminders", postgres_url), {})
    assert capsys.readouterr().out.splitlines() == [f"m{n} body of m{n}" for n in range(5)]
    assert store.rows(hook, "reminders") == []
