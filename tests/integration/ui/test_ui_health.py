"""The verdict of the operations page: its status, and the cause that an operator has to know first."""

from __future__ import annotations

import re
from contextlib import closing
from datetime import datetime, timedelta

import pytest
from airflow.models.dag import DagModel
from airflow.sdk import DAG
from airflow.utils.session import create_session
from support.operations_page import Page, dags
from support.rabbitmq import VirtualHost, eventually, messages
from support.sqs import World
from support.standing import give_up
from support.stores import Store, Transport, message, on_postgres_too

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.sqs.settings import QueueSettings

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
#: Past the minute after which an ended dispatcher is late.
LATE = timedelta(minutes=2)


def health(page: Page, role: str = "op") -> dict:
    page.pool.close()
    for name in ("store", "rabbitmq", "sqs"):
        page.pool.invalidate(name)
    return page.get("/api/v1/health", role)


def dispatched_by(hook: DelayedStoreHook, dag_id: str | None = None) -> str:
    """Let a dispatcher make one pass and end; return its id."""
    with closing(hook.dispatcher(["broker"], lambda *_: Transport(), dag_id=dag_id)) as dispatcher:
        dispatcher.run()
    return dispatcher.id


@pytest.fixture
def dag(airflow_db: None):
    """A DAG of a dispatcher, paused."""
    with DAG("dispatch_store") as made:
        StoreDispatchOperator(task_id="t", store_conn_id="db", deliver_conn_ids=["broker"])
    with dags(made, paused=True):
        yield made.dag_id


@on_postgres_too
def test_all_is_well(store: Store, page: Page):
    hook = store.installed()
    dispatched_by(hook)
    due = hook.now() + HOUR
    hook.send([message("later", due)])
    found = health(page)
    assert (found["status"], found["causes"], found["hidden"]) == ("ok", [], False)
    assert datetime.fromisoformat(found["next_due"]) == due


def test_no_dispatcher_is_the_cause_and_its_dag_is_paused(store: Store, page: Page, dag: str):
    hook = store.installed()
    dispatcher = dispatched_by(hook, dag)
    hook.send([message(f"m{number}", hook.now() - LATE) for number in range(17)])
    found = health(page)
    (cause,) = found["causes"]
    assert (found["status"], cause["code"], cause["severity"]) == ("failing", "no-dispatcher", "error")
    assert (cause["connection_id"], cause["kind"], cause["states"]) == (store.conn_id, "store", ["due", "retrying"])
    assert cause["what"].startswith("17 overdue, the oldest since ")
    assert cause["what"].endswith("; the DAG of the last dispatcher, dispatch_store, is paused")
    assert (cause["paused_dag"], cause["run_dag"], cause["remedy"]) == (dag, None, "unpause the DAG dispatch_store")
    seen = page.get(f"/api/v1/stores/{store.conn_id}/summary", "op")["dispatchers"]
    assert [(one["dispatcher"], one["dag_id"], bool(one["host"])) for one in seen] == [(dispatcher, dag, True)]
    with create_session() as session:
        session.get(DagModel, dag).is_paused = False
    (cause,) = health(page)["causes"]
    assert (cause["code"], cause["paused_dag"], cause["run_dag"]) == ("no-dispatcher", None, dag)
    assert "airflow delayed dispatcher --store-conn-id" in cause["remedy"]


def test_a_forged_dispatcher_has_no_dag_unpaused(store: Store, page: Page, dag: str):
    hook = store.installed()
    dispatcher = dispatched_by(hook, dag)
    hook.send([message("m", hook.now() - LATE)])
    with hook.engine.begin() as connection:
        now = hook.now()
        row = {"ConnIds": '["broker"]', "StartedAt": now, "EndedAt": now, "DagId": "drop_production"}
        rows = [{**row, "Id": "future", "SeenAt": now + 900 * 24 * HOUR}, {**row, "Id": "present", "SeenAt": now}]
        connection.execute(hook.tables.dispatchers.insert(), rows)
    with dags(DAG("drop_production"), paused=True):
        (cause,) = health(page)["causes"]
    assert (cause["code"], cause["paused_dag"], cause["remedy"]) == ("no-dispatcher", dag, f"unpause the DAG {dag}")
    # a sign of life that is still to come is none
    assert {one.dispatcher for one in hook.dispatchers()} == {"present", dispatcher}


def test_a_dispatcher_says_which_connection_fails_and_how_much_it_does(
    store: Store, page: Page, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("airflow_delayed.store.dispatch.dispatcher.HEARTBEAT", 0.05)
    hook = store.installed()
    hook.send([message(f"m{number}", hook.now() - LATE) for number in range(3)])
    transport = Transport(lost_after=0)
    dispatcher = store.dispatcher(hook, transport)
    dispatcher.once()

    def seen() -> dict[str, object]:
        page.pool.invalidate_store(store.conn_id)
        (one,) = page.get(f"/api/v1/stores/{store.conn_id}/summary", "op")["dispatchers"]
        return one

    eventually(lambda: seen()["problem"])
    said = str(seen()["problem"])
    assert re.fullmatch(r"connection 'broker': reset by peer \(since [-\d]+ [:\d]+ UTC\)", said)
    assert seen()["at_work"]
    (cause,) = [one for one in health(page)["causes"] if one["code"] == "connection-fails"]
    assert (cause["severity"], cause["deliver_conn_id"]) == ("error", "broker")
    assert re.match(
        r"dispatchers cannot send through it since [-\d]+ [:\d]+ UTC: reset by peer \(3 overdue; ", cause["what"]
    )
    assert datetime.fromisoformat(cause["since"]) <= hook.now()
    dispatcher.close()
    assert (seen()["problem"], seen()["at_work"]) == (said, False)


def test_each_destination_has_a_verdict_of_its_own(store: Store, page: Page, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("airflow_delayed.store.dispatch.dispatcher.HEARTBEAT", 0.05)
    hook = store.installed()
    hook.send([message("m", hook.now()), message("n", hook.now(), destination="gone")])
    store.dispatcher(hook, Transport(missing={"gone"})).once()

    def verdicts() -> dict[str, tuple[object, ...]]:
        page.pool.invalidate_store(store.conn_id)
        late = health(page)["lateness"]
        return {one["destination"]: (one["status"], one["code"], one["conn_id"]) for one in late}

    # for the first seconds it needs a look, then it fails; the other one goes on
    warned = {"q": ("delivering", None, "broker"), "gone": ("late", "destination-missing", "broker")}
    with monkeypatch.context() as patched:
        patched.setattr("airflow_delayed.store.health._FAILS_AFTER", HOUR)
        eventually(lambda: verdicts() == warned)
    monkeypatch.setattr("airflow_delayed.store.health._FAILS_AFTER", 0 * HOUR)
    assert verdicts() == {**warned, "gone": ("failing", "destination-missing", "broker")}
    gone, delivered = health(page)["lateness"]
    assert (gone["destination"], delivered["dispatched"]) == ("gone", 1)
    assert datetime.fromisoformat(gone["since"]) <= hook.now()


@on_postgres_too
def test_a_pause_is_in_the_verdict(store: Store, page: Page):
    hook = store.installed()
    dispatched_by(hook)
    hook.send([message("m", hook.now() - LATE)])
    url = f"/api/v1/stores/{store.conn_id}"
    # the queue tables of the store are named as they are paused
    selections = [{"destination": "q"}, {"deliver_conn_id": "broker"}, {"deliver_conn_id": store.conn_id}]
    for selection in selections:
        page.post(f"{url}/pause", "op", selection=selection, dry_run=False)
    found = health(page)
    assert (found["status"], {one["code"] for one in found["causes"]}) == ("degraded", {"paused"})
    assert [one["pause"] for one in found["causes"]] == selections
    assert [one["selection"] for one in page.get(f"{url}/pauses", "op")["pauses"]] == selections
    listed = [(one["destination"], one["conn_id"], one["status"]) for one in found["lateness"]]
    # a connection is no destination
    assert listed == [("q", "", "paused")]
    for selection in selections:
        assert page.post(f"{url}/unpause", "op", selection=selection, dry_run=False)["ended"]
    assert {one["code"] for one in health(page)["causes"]} == {"no-dispatcher"}


def test_failed_messages_are_no_failure_of_the_whole(store: Store, page: Page, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "plugins")
    hook = store.installed()
    dispatched_by(hook)
    hook.send([message("m", hook.now() - LATE)])
    give_up(hook, "m")
    found = health(page)
    (cause,) = found["causes"]
    assert (found["status"], cause["code"], cause["states"]) == ("degraded", "failed", ["failed"])
    assert cause["what"] == "1 were given up and are not tried again, most of them because: queue 'q' is not there"
    # why may name hosts and users: it is for those who may read the connection
    assert health(page, "viewer")["causes"][0]["what"] == "1 were given up and are not tried again"


def test_a_connection_that_is_away_is_a_cause_and_hides_no_other(
    store: Store, page: Page, connect, monkeypatch: pytest.MonkeyPatch
):
    hook = store.installed()
    connect("away", "postgresql://somebody:secret@127.0.0.1:1/nothing")
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_STORES", f"away,{store.conn_id}")
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "plugins")
    hook.send([message("m", hook.now() - LATE)])
    found = health(page)
    away, late = found["causes"]
    assert (found["status"], away["code"], away["severity"]) == ("failing", "unreachable", "error")
    assert "127.0.0.1" in away["what"]
    assert "look whether its server runs" in away["remedy"]
    assert late["code"] == "no-dispatcher"
    again = health(page)["causes"][0]
    assert again["since"] == away["since"]
    # where it is and who logs in is for those who may read the connection
    hidden = health(page, "viewer")["causes"][0]
    assert hidden["what"] == "connection 'away' cannot be used; the api-server's log says why"


def test_it_is_about_what_the_user_may_view(store: Store, page: Page):
    hook = store.installed()
    hook.send([message("m", hook.now() - LATE)])
    found = health(page, "viewer")
    assert (found["status"], found["causes"], found["next_due"], found["hidden"]) == ("ok", [], None, True)


def test_rabbitmq(store: Store, page: Page, empty_vhost: VirtualHost, connect, monkeypatch: pytest.MonkeyPatch):
    store.installed()
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_RABBITMQ", "rabbit")
    hook = RabbitMQDelayHook(connect("rabbit", **empty_vhost.connection))
    assert [(one["code"], one["severity"]) for one in health(page)["causes"]] == [("missing", "error")]
    hook.install(["gone"], create_destinations=True)
    hook.send(messages("gone", [3] * 3))
    with empty_vhost.channel() as channel:
        channel.queue_delete("gone")
    eventually(lambda: empty_vhost.count("delayed.hex.unroutable") == 3)
    page.pool.invalidate("rabbitmq rabbit")
    (cause,) = health(page)["causes"]
    assert (cause["code"], cause["severity"], cause["kind"]) == ("unroutable", "warning", "rabbitmq")
    assert cause["what"].startswith("3 messages whose destination was not there when they were due")
    assert cause["remedy"].startswith("airflow delayed redrive --conn-id rabbit --dry-run")
    with empty_vhost.channel() as channel:
        for level in (5, 6):
            channel.queue_delete(f"delayed.hex.{level:07}")
    page.pool.invalidate("rabbitmq rabbit")
    (missing, _) = health(page)["causes"]
    assert (missing["code"], missing["severity"]) == ("missing", "error")
    assert re.fullmatch(r"queue delayed.hex.000000\d, and 1 others", missing["where"])
    assert missing["remedy"] == "install what is missing: airflow delayed install --conn-id rabbit"


def test_sqs(store: Store, page: Page, world: World, monkeypatch: pytest.MonkeyPatch):
    store.installed()
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_SQS", f"sqs_test:{world.destination}")
    settings = QueueSettings(dead_letter_queue=f"{world.queue}-dead", max_receive_count=1)
    world.hook.install([world.destination], create_destinations=True, settings=settings)
    world.hook.send(world.message(0, f"m{number}") for number in range(3))
    world.client.set_queue_attributes(QueueUrl=world.url_of(world.queue), Attributes={"VisibilityTimeout": "0"})
    eventually(lambda: not world.raw(delete=False) and world.counts(f"{world.queue}-dead")[0] == 3)
    (cause,) = health(page)["causes"]
    assert (cause["code"], cause["severity"]) == ("dead-letters", "warning")
    assert (cause["kind"], cause["queue"]) == ("sqs", world.destination)


def test_who_changed_what(store: Store, page: Page):
    hook = store.installed()
    hook.send([message(f"m{number}", hook.now() + HOUR, tag="t") for number in range(3)])
    for name in ("m0", "m1"):
        page.post(f"/api/v1/stores/{store.conn_id}/cancel", "op", ids=[name], dry_run=False)
    url = f"/api/v1/stores/{store.conn_id}/audit"
    first = page.get(url, "op", limit=1)
    (entry,) = first["entries"]
    assert (entry["who"], entry["action"], entry["counts"]) == ("user op", "cancel", {"cancelled": 1})
    assert entry["selection"] == {"ids": 1, "first": ["m1"]}
    (second,) = page.get(url, "op", limit=5, after=first["next"])["entries"]
    assert second["selection"]["first"] == ["m0"]
    assert page.error("GET", url, "op", params={"after": "m0"}) == (400, "invalid")
