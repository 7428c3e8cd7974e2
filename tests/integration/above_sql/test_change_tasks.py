"""The operators that change messages: on a store, and in DAGs."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from support.examples import result
from support.standing import give_up
from support.stores import Store, Transport, message, on_postgres_too

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import Origin
from airflow_delayed.operators.change import (
    DelayedCancelOperator,
    DelayedRescheduleOperator,
    DelayedRetryOperator,
)
from airflow_delayed.operators.send import DelayedSendOperator

KINDS = {
    "cancel": DelayedCancelOperator,
    "reschedule": DelayedRescheduleOperator,
    "retry": DelayedRetryOperator,
}
DAY, HOUR = timedelta(days=1), timedelta(hours=1)


def changed(store: Store, kind: type, **options: object):
    arguments = {"task_id": "change", "store_conn_id": store.conn_id, "schema": store.schema, **options}
    return kind(**arguments).execute({})


def waiting(hook: DelayedStoreHook) -> list[str]:
    return sorted(one.message_id for one in hook.list())


@pytest.fixture
def hook(store: Store) -> DelayedStoreHook:
    """A store with messages of two tags, destinations, days and DAGs."""
    made = store.installed()
    due = made.now() + DAY
    made.origin = Origin(dag_id="d1", run_id="r1", task_id="send")
    made.send([message("a", due, tag="ann"), message("b", due + DAY, tag="ann", destination="p")])
    made.origin = Origin(dag_id="d2", run_id="r2", task_id="send")
    made.send([message("c", due, tag="bob"), message("d", due + 2 * DAY, tag="bob")])
    return made


@on_postgres_too
@pytest.mark.parametrize(
    "selection, expected",
    [
        ({"ids": ["a", "c"]}, "ac"),
        ({"ids": "d"}, "d"),
        ({"ids": []}, ""),
        ({"ids": {"sent": 2, "message_ids": ["b"]}}, "b"),
        ({"tag": "ann"}, "ab"),
        ({"destination": "p"}, "b"),
        ({"tag": "bob", "destination": "q"}, "cd"),
        ({"deliver_conn_id": "broker"}, "abcd"),
        ({"sent_by": {"dag_id": "d1"}}, "ab"),
        ({"sent_by": {"dag_id": "d2", "run_id": "r2", "task_id": "send", "map_index": "-1"}}, "cd"),
        ({"sent_by": {"dag_id": "d2", "run_id": "r1"}}, ""),
    ],
)
def test_what_is_selected(store: Store, hook: DelayedStoreHook, selection: dict[str, object], expected: str):
    would = changed(store, DelayedCancelOperator, **selection, dry_run=True)
    assert waiting(hook) == ["a", "b", "c", "d"]
    done = changed(store, DelayedCancelOperator, **selection)
    named = {"cancelled": list(expected)} if expected else {}
    assert {name: sorted(ids) for name, ids in done["ids"].items()} == named
    assert done["outcomes"] == {name: len(ids) for name, ids in named.items()}
    assert done["changed"] == len(expected)
    assert would == {**done, "dry_run": True}
    assert waiting(hook) == sorted({*"abcd"} - {*expected})


def test_due_times(store: Store, hook: DelayedStoreHook):
    now = hook.now()
    end = (now + 2 * DAY + HOUR).isoformat()
    done = changed(store, DelayedRescheduleOperator, due_until=end, due_from=now + DAY - HOUR, delay="3600")
    assert done["outcomes"] == {"rescheduled": 3}
    dues = {one.message_id: one.due_at for one in hook.list()}
    assert {name: due.isoformat() for name, due in dues.items() if name != "d"} == dict.fromkeys("abc", done["due_at"])
    assert now + HOUR <= dues["a"] <= hook.now() + HOUR
    again = changed(store, DelayedRescheduleOperator, ids=["a", "x"], due_at=done["due_at"])
    assert again["outcomes"] == {"unchanged": 1, "absent": 1}


def test_failed_messages_are_retried(store: Store, hook: DelayedStoreHook):
    hook.reschedule(["a", "b"], delay=0)
    store.dispatcher(hook, Transport(missing={"q", "p"}), number_of_retries=0).once()
    assert {one.message_id for one in hook.list(state="failed")} == {"a", "b"}
    done = changed(store, DelayedRetryOperator, ids=["a", "c", "x"])
    assert (done["changed"], done["outcomes"]) == (1, {"retried": 1, "unchanged": 1, "absent": 1})
    assert changed(store, DelayedRetryOperator, tag="ann")["ids"] == {"retried": ["b"]}
    assert [one.message_id for one in hook.list(state="failed")] == []


def test_what_is_missing(store: Store, hook: DelayedStoreHook, log):
    hook.cancel(["b"])
    done = changed(store, DelayedCancelOperator, ids=["a", "b", "x"])
    assert done["outcomes"] == {"cancelled": 1, "already cancelled": 1, "absent": 1}
    assert "1 absent of 3 messages (x: absent)" in log.text
    with pytest.raises(AirflowFailException, match=r"1 absent of 2 messages \(x: absent\). If that may be, "):
        changed(store, DelayedCancelOperator, ids=["c", "x"], on_missing="fail")
    # the others are changed
    assert waiting(hook) == ["d"]
    with pytest.raises(AirflowFailException, match="no message matches"):
        changed(store, DelayedCancelOperator, tag="ann", on_missing="fail")
    assert changed(store, DelayedCancelOperator, tag="ann", on_missing="fail", dry_run="True")["changed"] == 0
    before = log.text
    assert changed(store, DelayedCancelOperator, tag="ann", on_missing="ignore")["outcomes"] == {}
    assert "no message matches" not in log.text.removeprefix(before)


def test_what_a_broker_has_already_is_a_warning(store: Store, hook: DelayedStoreHook, log):
    due_at = (hook.now() + DAY).replace(microsecond=0)
    hook.note_sent([message("direct", due_at, tag="ann")])
    done = changed(store, DelayedCancelOperator, tag="ann")
    ahead = {"deliver_conn_id": "broker", "messages": 1, "until": due_at.isoformat()}
    assert (done["outcomes"], done["out_of_reach"]) == ({"cancelled": 2}, [ahead])
    text = f"1 was dispatched to broker, is due at {due_at.isoformat()} and cannot be taken back"
    assert f"2 cancelled; {text}" in log.text
    assert "out_of_reach" not in changed(store, DelayedRescheduleOperator, tag="bob", delay=3600)


def test_what_is_being_delivered_is_worth_a_retry(store: Store, hook: DelayedStoreHook):
    hook.reschedule(["a"], delay=0)

    class Slow(Transport):
        def send(self, messages):
            with pytest.raises(AirflowException, match=r"1 in flight of 1 messages .* a retry looks again") as caught:
                changed(store, DelayedCancelOperator, ids=["a"], on_missing="fail")
            assert not isinstance(caught.value, AirflowFailException)
            return super().send(messages)

    assert store.dispatcher(hook, Slow()).once().dispatched == 1
    done = changed(store, DelayedCancelOperator, ids=["a"])
    assert done["outcomes"] == {"dispatched": 1}


def test_of_many_messages_the_log_says_how_many_are_changed(
    store: Store, hook: DelayedStoreHook, log, caplog, monkeypatch
):
    monkeypatch.setattr("airflow_delayed.store.bulk_changes.LOGGED_EVERY", 0.0)
    due, ids = hook.now() + DAY, [f"m{number:04}" for number in range(2130)]
    hook.send([message(one, due, tag="many") for one in ids])
    done = changed(store, DelayedRescheduleOperator, tag="many", delay=5 * 86_400)
    assert done["outcomes"] == {"rescheduled": 2130}
    # the first hundred are named
    assert done["ids"] == {"rescheduled": ids[:100]}
    assert re.findall("so far: (.*) rescheduled", caplog.text) == ["1,000", "2,000", "2,130"]
    assert "done: 2,130 rescheduled" in log.text
    assert changed(store, DelayedCancelOperator, ids=ids * 2)["outcomes"] == {"cancelled": 2130}
    # each is one change
    assert [(one.action, sum(one.counts.values())) for one in hook.audit()][:2] == [
        ("cancel", 2130),
        ("reschedule", 2130),
    ]
    assert waiting(hook) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_in_a_dag(store: Store, run_dag, connect):
    """What another task returned, a mapped task, the run itself."""
    hook = store.installed(deliver_conn_id=None)
    with DAG("change", schedule=None) as dag:
        rows = [{"value": name, "tag": name, "delay_seconds": 86_400} for name in ("ann", "bob", "eve", "joe")]
        send = DelayedSendOperator(task_id="send", conn_id=store.conn_id, destination="mail", messages=rows[:1])
        send_more = DelayedSendOperator(task_id="more", conn_id=store.conn_id, destination="mail", messages=rows[1:])

        @task
        def tags() -> list[str]:
            return ["bob", "eve"]

        mine = {"dag_id": "{{ dag.dag_id }}", "run_id": "{{ run_id }}"}
        by_ids = DelayedCancelOperator(task_id="by_ids", store_conn_id=store.conn_id, ids=send.output)
        move = DelayedRescheduleOperator.partial(task_id="move", store_conn_id=store.conn_id, delay=60).expand(
            tag=tags()
        )
        rest = DelayedCancelOperator(task_id="rest", store_conn_id=store.conn_id, sent_by=mine)
        send >> send_more >> by_ids >> move >> rest
    hook.install(["mail"], create_destinations=True)
    run = run_dag(dag)
    assert result(run, "by_ids")["ids"] == {"cancelled": result(run, "send")["message_ids"]}
    moved = [
        one.xcom_pull("move", map_indexes=one.map_index) for one in run.get_task_instances() if one.task_id == "move"
    ]
    assert [one["outcomes"] for one in moved] == [{"rescheduled": 1}] * 2
    assert result(run, "rest")["outcomes"] == {"cancelled": 3}
    assert waiting(hook) == []
    who = {record.who.split(",")[0] for record in hook.audit()}
    assert who == {"task change.by_ids", "task change.move", "task change.rest"}


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_a_mapped_row_with_a_null_changes_nothing(store: Store, run_dag, capsys):
    """A customer without a name must not stand for all customers."""
    hook = store.installed()
    hook.send([message("a", hook.now() + DAY, tag="ann"), message("b", hook.now() + DAY, tag="bob")])
    give_up(hook, "b")
    hook.send([message("c", hook.now() + DAY, tag="eve")])
    hook.cancel("c")
    before = [(one.message_id, one.due_at, one.state) for one in hook.list()]
    with DAG("null", schedule=None) as dag:

        @task
        def customers() -> list[dict[str, str | None]]:
            return [{"tag": None, "destination": "q"}]

        rows = customers()
        for name, kind in KINDS.items():
            more = {"delay": 60} if name == "reschedule" else {}
            mapped = kind.partial(task_id=name, store_conn_id=store.conn_id, **more)
            mapped.expand_kwargs(rows)
            kind.partial(task_id=f"{name}_literal", store_conn_id=store.conn_id, **more).expand_kwargs(
                [{"tag": None, "destination": "q"}]
            )
    run = run_dag(dag)
    states = {one.task_id: one.state for one in run.get_task_instances()}
    assert states.pop("customers") == "success"
    assert states == {f"{name}{more}": "failed" for name in KINDS for more in ("", "_literal")}
    assert capsys.readouterr().out.count("tag= is None, which would select more messages, so nothing is changed") >= 8
    assert [(one.message_id, one.due_at, one.state) for one in hook.list()] == before
    assert hook.restore("c") == {"c": "restored"}


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_the_results_of_a_mapped_send_name_its_messages(store: Store, run_dag):
    hook = store.installed(deliver_conn_id=None)
    hook.install(["mail"], create_destinations=True)
    with DAG("mapped", schedule=None) as dag:
        send = DelayedSendOperator.partial(task_id="send", conn_id=store.conn_id, destination="mail", delay=DAY).expand(
            value=["a", "b", "c"]
        )
        DelayedCancelOperator(
            task_id="cancel", store_conn_id=store.conn_id, ids=send.output, because="{{ dag.dag_id }} ends"
        )
    run = run_dag(dag)
    assert result(run, "cancel")["outcomes"] == {"cancelled": 3}
    assert waiting(hook) == []
    assert [(one.action, one.because) for one in hook.audit()] == [("cancel", "mapped ends")]
