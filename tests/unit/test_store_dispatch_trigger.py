from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from airflow.models.trigger import Trigger
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred

from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.store.dispatch.report import DispatchReport
from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.triggers.store_dispatch import StoreDispatchTrigger

ARGUMENTS = {
    "store_conn_id": "store",
    "deliver_conn_ids": ["broker", "store"],
    "until": "2030-01-01T00:00:00+00:00",
    "table": "reminders",
    "schema": "airflow",
    "policy": {
        "lookahead": 15.0,
        "batch_size": 100,
        "number_of_retries": 3,
        "error_destination": "errors",
        "time_to_trigger_store_circuit_breaker": 30.0,
        "time_to_trigger_fetch_circuit_breaker": 31.0,
        "time_to_trigger_dispatch_circuit_breaker": 32.0,
        "maximum_recovery_failures_per_second": 2,
        "max_rate": 500,
        "remember": 86400.0,
        "claim_timeout": 20.0,
    },
    "summary": {
        "dispatched": 5,
        "retried": 4,
        "failed": 1,
        "expired": 2,
        "error_destination": 3,
        "forgotten": 6,
        "left_to_others": 7,
        "by_connection": {"broker": 5},
        "first_due": "2029-01-01T00:00:00+00:00",
        "last_due": "2029-01-02T00:00:00+00:00",
    },
    "failures": {"m1": "refused"},
    "began": "2028-12-31T23:00:00+00:00",
}
#: What a policy has had since then.
SINCE = {"allowed_destinations": None, "auto_lookahead": 900.0}


def stored(trigger: StoreDispatchTrigger) -> StoreDispatchTrigger:
    path, arguments = trigger.serialize()
    assert path == "airflow_delayed.triggers.store_dispatch.StoreDispatchTrigger"
    return StoreDispatchTrigger(**Trigger._decrypt_kwargs(Trigger.encrypt_kwargs(arguments)))


def test_arguments_are_stored_and_read_back():
    arguments = stored(StoreDispatchTrigger(**ARGUMENTS)).serialize()[1]
    assert arguments == ARGUMENTS
    policy = DispatchPolicy.restored(arguments["policy"])
    assert (policy.lookahead, policy.claim_timeout) == (timedelta(seconds=15), timedelta(seconds=20))
    assert policy.state() == {**ARGUMENTS["policy"], **SINCE}
    report = DispatchReport.from_json(arguments["summary"])
    assert report.first_due == datetime(2029, 1, 1, tzinfo=timezone.utc)
    assert report.to_json() == ARGUMENTS["summary"]


def test_what_is_left_out_is_as_by_default():
    assert stored(StoreDispatchTrigger("store", ["broker"])).serialize()[1]["until"] == "empty"
    later = {**ARGUMENTS["policy"], "of_later": 1}
    assert DispatchPolicy.restored(later).state() == {**ARGUMENTS["policy"], **SINCE}
    assert DispatchPolicy.restored({}) == DispatchPolicy()
    assert DispatchReport.from_json({}) == DispatchReport()


def operator(**options: object) -> StoreDispatchOperator:
    return StoreDispatchOperator(
        **{"task_id": "dispatch", "store_conn_id": "store", "deliver_conn_ids": "broker", "deferrable": True, **options}
    )


CARRIED = {
    "until": "2030-01-01T00:00:00+00:00",
    "summary": DispatchReport(dispatched=2).to_json(),
    "failures": {},
    "began": "2029-12-31T00:00:00+00:00",
}


def event(status: str, error: str | None = None) -> dict:
    return {"status": status, "summary": DispatchReport(dispatched=9).to_json(), "error": error}


def test_the_task_resumes_with_what_the_trigger_did():
    done = operator().resume({}, **CARRIED, event=event("done"))
    assert done == DispatchReport(dispatched=9).to_json()


def test_what_failed_in_the_trigger_fails_the_task_with_the_same_text():
    # messages that were given up are in the table of failed messages: a retry has nothing to do
    with pytest.raises(AirflowFailException, match=r"^3 failed$"):
        operator().resume({}, **CARRIED, event=event("given up", "3 failed"))
    with pytest.raises(AirflowException, match=r"^connection lost$") as caught:
        operator().resume({}, **CARRIED, event=event("unavailable", "connection lost"))
    assert not isinstance(caught.value, AirflowFailException)


def test_a_task_that_is_woken_without_an_event_defers_anew():
    task = operator(lookahead=timedelta(seconds=3), schema="airflow")
    with pytest.raises(TaskDeferred) as caught:
        task.resume({}, **CARRIED)
    deferred = caught.value
    assert (deferred.method_name, deferred.kwargs) == ("resume", CARRIED)
    arguments = deferred.trigger.serialize()[1]
    assert {name: arguments[name] for name in CARRIED} == CARRIED
    assert arguments["policy"]["lookahead"] == 3.0
    assert (arguments["store_conn_id"], arguments["deliver_conn_ids"]) == ("store", ["broker"])
    assert arguments["schema"] == "airflow"


def test_deferrable_is_as_airflow_is_set_up(monkeypatch):
    assert not StoreDispatchOperator(task_id="d", store_conn_id="s", deliver_conn_ids="b").deferrable


def test_nothing_but_names_and_counts_goes_to_the_triggerer():
    arguments = SimpleNamespace(**StoreDispatchTrigger("store", ["broker"]).serialize()[1])
    assert sorted(vars(arguments)) == sorted(ARGUMENTS)


def test_what_the_trigger_did_is_a_line_of_the_log(capsys):
    due = "2030-01-31T09:30:00+00:00"
    done = {"dispatched": 3002, "retried": 1, "failed": 0, "error_destination": 2, "forgotten": 1000}
    done |= {"by_connection": {"broker": 3000, "store": 2}, "first_due": due, "last_due": due, "left_to_others": 4}
    for summary, line in (
        ({"dispatched": 0}, "0 messages dispatched"),
        (
            done,
            f"3,002 messages dispatched (broker: 3,000, store: 2), due from {due} to {due}; 1 retried;"
            " 2 sent to the error destination; 4 left to other dispatchers; 1,000 ids forgotten",
        ),
    ):
        event = {"status": "done", "summary": summary, "error": ""}
        assert operator().resume({}, event=event) == summary
        # where Airflow writes the log of a task
        assert f"store 'store': {line} " in capsys.readouterr().out


def test_a_task_that_is_woken_with_nothing_at_all_begins_again(monkeypatch):
    task = operator()
    monkeypatch.setattr(task, "execute", lambda context: {"dispatched": 3})
    assert task.resume({}) == {"dispatched": 3}
