"""Escalations of several runs and tasks: whose success ends whose failure, and what one message stands for."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from support.arming import arm
from support.etl import Etl
from support.forked import Child
from support.lengths import length
from support.stores import DATABASES, Store, Transport, on_postgres_too

from airflow_delayed.message import utcnow
from airflow_delayed.store.records import StoredMessage

#: More than a message names, and fewer.
CROWDS = length("failures at the same moment", (16,), (4, 16))


def of(reachable: Store, **options: object) -> Etl:
    return Etl(reachable, reachable.installed(), **options)


# which success ends which failure


def test_an_older_run_that_ends_later_does_not_silence_a_newer_one(etl: Etl) -> None:
    etl.red("b", 0)
    etl.green("a", 5, lasted=65)
    assert (etl.waiting, etl.stands_for) == ([30], [["b"]])
    # cleared, and red too
    etl.red("a", 6)
    assert (etl.waiting, etl.stands_for) == ([30], [["a", "b"]])
    # a newer one replaces both
    etl.green("c", 7)
    assert etl.waiting == []


def test_a_day_that_is_cleared_and_green_leaves_the_next_day_s_escalation(etl: Etl) -> None:
    etl.red("1", 0)
    etl.red("2", 20)
    assert (etl.waiting, etl.stands_for) == ([30], [["1", "2"]])
    etl.green("1", 25, lasted=2)
    # something has been red all the time
    assert (etl.waiting, etl.stands_for) == ([30], [["2"]])
    assert [json.loads(body)["run_id"] for body in etl.bodies] == ["2"]
    etl.green("2", 26, lasted=1)
    assert etl.waiting == []


def test_the_next_day_counts_from_its_own_failure_if_all_was_green_between(etl: Etl) -> None:
    etl.red("1", 0)
    etl.red("2", 20)
    # its callback comes late
    etl.green("1", 10, lasted=2)
    assert (etl.waiting, etl.stands_for) == ([50], [["2"]])
    assert (etl.dispatch(49), len(etl.dispatch(50))) == ([], 1)


def test_a_failure_of_a_run_that_a_later_one_has_replaced_stores_nothing(etl: Etl, caplog) -> None:
    etl.green("b", 0)
    caplog.set_level("INFO")
    etl.red("a", 1)
    assert etl.waiting == []
    assert "nothing is stored: the run, or a later run that replaces it, has succeeded" in caplog.text
    etl.red("c", 2)
    assert etl.stands_for == [["c"]]


@pytest.mark.parametrize("kind", ["backfill", "manual", "asset_triggered"])
def test_a_red_run_below_a_green_night_stays_red_if_it_is_not_scheduled(etl: Etl, kind: str) -> None:
    etl.red("1", 0, kind=kind)
    etl.red("2", 1)
    assert etl.stands_for == [["1"], ["2"]]
    etl.green("3", 2)
    assert (etl.waiting, etl.stands_for) == ([30], [["1"]])
    # and the other way round
    etl.red("4", 3)
    etl.green("5", 4, kind=kind)
    assert etl.stands_for == [["1"], ["4"]]
    etl.green("1", 5, kind=kind, lasted=2)
    assert etl.stands_for == [["4"]]


@on_postgres_too
@pytest.mark.parametrize("per", ["run", "dag"])
def test_a_success_that_comes_before_its_failure_s_callback_ends_it(reachable: Store, broker: str, per: str) -> None:
    etl = of(reachable, per=per)
    failed = etl.context("a", 0)
    etl.green("a", 5, lasted=2)
    etl.on_failure(dict(failed))
    assert etl.waiting == []
    # a deadline that passed during the attempt that succeeded
    begun = etl.began + timedelta(minutes=3)
    run = {"dag_id": "etl", "dag_run_id": "a", "start_date": begun.isoformat(), "end_date": None}
    missed = {"id": "0199", "deadline_time": begun + timedelta(minutes=1)}
    etl.on_failure({"dag_run": run, "deadline": missed})
    assert etl.waiting == []
    # cleared, and red again
    etl.red("a", 20)
    assert etl.waiting == [50]


def test_a_failure_whose_start_airflow_does_not_pass_is_not_lost(etl: Etl) -> None:
    etl.green("a", 5)
    etl.on_failure({"dag": etl.dag, "run_id": "a", "reason": "timed_out"})
    assert len(etl.waiting) == 1
    etl.green("a", 6)
    assert etl.waiting == []


@on_postgres_too
def test_a_deadline_that_passed_before_its_run_began_is_ended_by_any_success_of_it(
    reachable: Store, broker: str
) -> None:
    etl = of(reachable, per="run")
    run = {"dag_id": "etl", "dag_run_id": "a", "start_date": None, "end_date": None}
    missed = {"dag_run": run, "deadline": {"id": "0199", "deadline_time": etl.began}}
    # the triggerer is slower than the whole run
    etl.green("a", 5)
    etl.on_failure(dict(missed))
    assert etl.waiting == []
    # without a success it is stored, and the next one takes it back
    etl.on_failure({**missed, "dag_run": {**run, "dag_run_id": "b"}})
    assert etl.waiting == [30]
    etl.green("b", 6)
    assert etl.waiting == []


@on_postgres_too
def test_a_scheduled_run_that_a_backfill_plays_again_ends_its_own_failure_alone(etl: Etl) -> None:
    day, night = "scheduled__2026-01-10T00:00:00+00:00", "scheduled__2026-01-11T00:00:00+00:00"
    etl.red(day, 0)
    etl.red(night, 1)
    # Airflow clears the same run, and makes it one of the backfill
    etl.green(day, 9, lasted=2, kind="backfill")
    assert etl.stands_for == [[night]]
    etl.green(night, 12, lasted=2, kind="backfill")
    assert etl.waiting == []


def test_two_customers_of_one_dag_are_red_by_themselves(reachable: Store, broker: str) -> None:
    etl = of(reachable, options={"key": "{{ params.customer }}"})
    acme, best = {"params": {"customer": "acme"}}, {"params": {"customer": "best"}}
    etl.red("1", 0, **acme)
    etl.green("2", 1, **best)
    assert [one.tag for one in etl.hook.list()] == ["notifier:etl@acme"]
    etl.red("3", 2, **best)
    etl.red("4", 3, **acme)
    assert etl.stands_for == [["1", "4"], ["3"]]
    etl.green("5", 4, **acme)
    assert etl.stands_for == [["3"]]
    # what is not scheduled, too
    etl.red("6", 5, **acme, kind="manual")
    assert [one.tag for one in etl.hook.list()] == ["notifier:etl@best", "notifier:etl@acme/6"]
    etl.green("6", 6, **acme, kind="manual")
    assert etl.stands_for == [["3"]]


def test_a_run_whose_key_cannot_be_rendered_is_red_by_itself(reachable: Store, broker: str, caplog) -> None:
    etl = of(reachable, options={"key": "{{ params.customer }}"})
    etl.on_failure({"dag": etl.dag, "run_id": "scheduled__2090-01-01T00:00:00+00:00"})
    assert "key= cannot be rendered (UndefinedError)" in caplog.text
    (one,) = etl.hook.list()
    assert one.tag == "notifier:etl/scheduled__2090-01-01T00:00:00+00:00"
    assert "key= cannot be rendered" in etl.headers[0]["latest"][0]["problem"]
    # its own success has the key
    context = etl.context("1", 5, params={"customer": "acme"})
    context["dag_run"].run_id = "scheduled__2090-01-01T00:00:00+00:00"
    etl.on_success(context)
    assert etl.waiting == []


def test_a_task_that_is_cleared_and_green_ends_its_own_failure_alone(reachable: Store, broker: str) -> None:
    etl = of(reachable, per="task")
    etl.red("a", 0, task="extract")
    etl.red("a", 1, task="load", map_index=0)
    etl.red("a", 2, task="load", map_index=1)
    assert sorted(str(one.tag) for one in etl.hook.list()) == [
        "notifier:etl/a/extract/-1",
        "notifier:etl/a/load/0",
        "notifier:etl/a/load/1",
    ]
    etl.green("a", 3, task="other")
    etl.green("a", 3, task="load", map_index=0, lasted=1)
    assert etl.waiting == [30, 32]
    # in the other order
    late = etl.context("a", 4, task="load", map_index=2)
    etl.green("a", 9, task="load", map_index=2, lasted=1)
    etl.on_failure(late)
    assert etl.waiting == [30, 32]


# what one message stands for


def test_a_further_failure_joins_the_message_that_waits(etl: Etl) -> None:
    for number in range(12):
        etl.red(f"{number:02}", number)
    assert etl.waiting == [30]
    (header,) = etl.headers
    named = [f"{number:02}" for number in range(2, 12)]
    assert (header["failures"], [one["run_id"] for one in header["latest"]]) == (12, named)
    (body,) = map(json.loads, etl.bodies)
    assert (body["run_id"], body["failures"], body["latest"]) == ("11", 12, header["latest"])
    # one of those that are named ends the older ones too
    etl.green("09", 15)
    assert (etl.headers[0]["failures"], etl.stands_for) == (2, [["10", "11"]])


def test_a_body_of_the_author_stays_and_the_header_has_the_failures(reachable: Store, broker: str) -> None:
    etl = of(reachable)
    own = etl.notifier(value="{{ run_id }} is red", headers={"severity": "high"})
    etl.red("1", 0, own)
    etl.red("2", 1, own)
    assert (etl.bodies, etl.stands_for) == ([b"1 is red"], [["1", "2"]])
    transport = Transport()
    etl.dispatch(30, transport)
    (sent,) = transport.sent
    assert (sent.body, sent.headers["severity"]) == (b"1 is red", "high")
    assert json.loads(sent.headers["airflow-escalation"])["failures"] == 2


def test_what_is_past_due_or_on_its_way_is_not_joined(etl: Etl) -> None:
    # past due by the database's clock, and no dispatcher there
    etl.red("1", -40)
    etl.red("2", 0)
    assert (etl.waiting, etl.stands_for) == ([-10, 30], [["1"], ["2"]])
    # both are taken back
    etl.green("3", 1)
    assert etl.waiting == []
    # leased while it is joined
    etl.red("4", 10)

    class Sending(Transport):
        def send(self, messages):
            messages = list(messages)
            etl.red("5", 11)
            return super().send(messages)

    etl.dispatch(40, Sending())
    assert (etl.waiting, etl.stands_for) == ([41], [["5"]])


def test_a_failure_for_another_desk_has_a_message_of_its_own(reachable: Store, broker: str) -> None:
    etl = of(reachable, per="run")
    notifier = etl.notifier(destination="desk-{{ ti.task_id }}")
    for minutes, task in enumerate(("extract", "billing", "extract")):
        etl.red("a", minutes, notifier, task=task)
    assert [(one.destination, found["failures"]) for one, found in zip(etl.hook.list(), etl.headers, strict=True)] == [
        ("desk-extract", 2),
        ("desk-billing", 1),
    ]
    etl.green("a", 5)
    assert etl.waiting == []


def test_two_notifiers_that_differ_in_anything_store_both(reachable: Store, broker: str) -> None:
    etl = of(reachable)
    both = [etl.notifier(value="page the on-call"), etl.notifier(value="tell the customer desk")]
    context = etl.context("a", 0)
    for notifier in both * 2:
        notifier(dict(context))
    assert sorted(etl.bodies) == [b"page the on-call", b"tell the customer desk"]
    etl.green("a", 1)
    assert etl.waiting == []


def test_two_tasks_of_one_run_are_one_message_that_names_both(reachable: Store, broker: str) -> None:
    etl = of(reachable, per="run")
    etl.red("a", 0, task="extract")
    etl.red("a", 1, task="billing")
    assert etl.waiting == [30]
    assert [one["task_id"] for one in etl.headers[0]["latest"]] == ["extract", "billing"]


@pytest.mark.parametrize("store", DATABASES, indirect=True)
@pytest.mark.parametrize("size", CROWDS)
def test_failures_at_the_same_moment_are_one_message(reachable: Store, broker: str, size: int) -> None:
    etl = of(reachable, per="run")
    begun = utcnow()
    children = [Child(arm, store=reachable.conn_id, map_index=number, started_at=begun) for number in range(size)]
    try:
        assert [child.answer() for child in children] == ["ready"] * size
        for child in children:
            child.say("go")
        assert [child.answer() for child in children] == ["done"] * size
    finally:
        for child in children:
            child.close()
    # one message that stands for all
    (header,) = etl.headers
    assert header["failures"] == size
    assert len({one["map_index"] for one in header["latest"]}) == min(size, 10)


# the page and its links


def test_the_message_is_found_by_its_run_and_links_to_it(reachable: Store, broker: str, monkeypatch) -> None:
    from airflow_delayed.identity import Origin, SentBy

    etl = of(reachable)
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example.org/prod/")
    etl.red("night 1", 0, task="load", map_index=3)
    (one,) = etl.hook.list(sent_by=SentBy(dag_id="etl", run_id="night 1"))
    assert isinstance(one, StoredMessage)
    assert one.origin == Origin(dag_id="etl", run_id="night 1", task_id="load", map_index=3)
    (body,) = map(json.loads, etl.bodies)
    run = "https://airflow.example.org/prod/dags/etl/runs/night%201"
    assert (body["run_url"], body["log_url"]) == (run, f"{run}/tasks/load/mapped/3?try_number=1")
    monkeypatch.delenv("AIRFLOW__API__BASE_URL")
    etl.hook.cancel([one.message_id])
    etl.on_failure({"dag": etl.dag, "run_id": "night 2", "reason": "timed_out"})
    (body,) = map(json.loads, etl.bodies)
    assert (body["reason"], "run_url" in body, "task_id" in body) == ("timed_out", False, False)
    (one,) = etl.hook.list(sent_by=SentBy(dag_id="etl", run_id="night 2"))
    assert one.origin.task_id == ""
