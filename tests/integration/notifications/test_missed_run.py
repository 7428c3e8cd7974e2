"""MissedRunNotifier with a store: silence escalates, and a good end in time keeps it from doing so."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from airflow.sdk import DAG, Asset
from support.examples import dags_of
from support.stores import Store, Transport, on_postgres_too

from airflow_delayed.errors import InputError
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import SentBy
from airflow_delayed.message import utcnow
from airflow_delayed.notifications.missed_run import MissedRunNotifier

HOUR = timedelta(hours=1)
WITHIN = timedelta(minutes=20)


@dataclass
class Watched:
    """A DAG with a run each hour. Runs are numbered: run 0 is that of the hour in which the test runs."""

    store: Store
    hook: DelayedStoreHook
    options: dict[str, Any] = field(default_factory=dict)
    schedule: Any = "0 * * * *"
    catchup: bool = False

    def __post_init__(self) -> None:
        # that no hour begins while a test runs
        self.hour = (utcnow() + timedelta(minutes=5)).replace(minute=0, second=0, microsecond=0)
        shared = {"conn_id": "broker", "store_conn_id": self.store.conn_id, "destination": "desk", "within": WITHIN}
        self.notifier = MissedRunNotifier(**{**shared, **self.options})
        start = datetime(2026, 1, 1, tzinfo=timezone.utc)
        self.dag = DAG("etl", schedule=self.schedule, catchup=self.catchup, start_date=start)

    def at(self, number: float) -> datetime:
        """When a run is due."""
        return self.hour + number * HOUR

    def context(
        self, number: float, *, kind: str = "scheduled", params: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What Airflow passes to the callback of a run that has just ended."""
        at = self.at(number)
        times = {"start_date": at + timedelta(seconds=2), "end_date": at + timedelta(seconds=9)}
        name = f"{kind}__{at.isoformat()}"
        run = SimpleNamespace(dag_id="etl", run_id=name, run_type=kind, run_after=at, **times)
        ti = SimpleNamespace(id=uuid4(), task_id="work", map_index=-1, try_number=1, **times)
        return {"dag": self.dag, "run_id": name, "dag_run": run, "ti": ti, "params": params or {}, "reason": "success"}

    def arm(self, number: float = 0) -> tuple[str, str, datetime]:
        return self.notifier.arm_first(self.dag, self.at(number))

    def green(self, number: float, **options: Any) -> None:
        self.notifier(self.context(number, **options))

    def begins(self, number: float, **options: Any) -> None:
        context = self.context(number, **options)
        context["dag_run"].end_date = context["ti"].end_date = None
        self.notifier.arm_own(context)

    @property
    def watched(self) -> list[float]:
        """The numbers of the runs that a message is about, by due time."""
        failures = [json.loads(self.content(one.message_id).headers["airflow-escalation"]) for one in self.hook.list()]
        assert all(one["failures"] == 1 for one in failures)
        return [(datetime.fromisoformat(one["latest"][0]["run_after"]) - self.hour) / HOUR for one in failures]

    @property
    def due(self) -> list[datetime]:
        return [one.due_at for one in self.hook.list()]

    def content(self, message_id: str) -> Any:
        return self.hook.content(message_id, body_limit=10_000)

    def delivered_until(self, moment: datetime) -> list[dict[str, Any]]:
        transport = Transport()
        options = {"lookahead": timedelta(minutes=15), "database_time": lambda connection: moment}
        dispatcher = self.store.dispatcher(self.hook, transport, **options)
        dispatcher.once()
        dispatcher.close()
        return [json.loads(one.body) for one in transport.sent]


@pytest.fixture(name="watched")
def watched_fixture(reachable: Store, broker: str) -> Watched:
    return Watched(reachable, reachable.installed())


@pytest.fixture(name="watch")
def watch_fixture(reachable: Store, broker: str):
    hook = reachable.installed()
    return lambda **options: Watched(reachable, hook, **options)


@on_postgres_too
def test_each_good_end_moves_the_message_to_the_next_run_and_silence_delivers_it(watched: Watched) -> None:
    watched.arm(0)
    assert watched.watched == [0]
    watched.green(0)
    assert (watched.watched, watched.due) == ([1], [watched.at(1) + WITHIN])
    watched.green(1)
    assert (watched.watched, watched.due) == ([2], [watched.at(2) + WITHIN])
    # nothing more is heard of the DAG
    deadline = watched.at(2) + WITHIN
    assert watched.delivered_until(deadline - timedelta(seconds=1)) == []
    (body,) = watched.delivered_until(deadline)
    assert body == {
        "dag_id": "etl",
        "run_id": f"scheduled__{watched.at(2).isoformat()}",
        "run_after": watched.at(2).isoformat(),
        "started_at": watched.at(2).isoformat(),
        "failed_at": deadline.isoformat(),
        "reason": "missed",
        "failures": 1,
    }


def test_the_tag_and_the_run_of_the_message_are_those_of_the_run_that_is_missed(watched: Watched) -> None:
    watched.green(0)
    (one,) = watched.hook.list(tag="missed-run:etl")
    run = SentBy(dag_id="etl", run_id=f"scheduled__{watched.at(1).isoformat()}")
    assert [found.message_id for found in watched.hook.list(sent_by=run)] == [one.message_id]


def test_a_run_that_ends_well_after_its_deadline_cannot_take_it_back_and_the_next_one_is_watched(
    watched: Watched, caplog
) -> None:
    watched.arm(-1)
    assert len(watched.delivered_until(utcnow() + WITHIN)) == 1
    with caplog.at_level(logging.INFO):
        watched.green(-1)
    assert "it has ended well too late: a dispatcher has handed over" in caplog.text
    assert watched.watched == [0]


@pytest.mark.parametrize("catchup", [True, False])
def test_a_run_that_was_due_long_ago_has_its_time_from_now_on(watch, catchup: bool) -> None:
    watched = watch(catchup=catchup)
    before = utcnow()
    watched.green(-5)
    # run -4 is next with catchup=True; without it Airflow may leave it out, and the next run has as long
    (due,) = watched.due
    assert before + WITHIN - timedelta(seconds=5) <= due <= utcnow() + WITHIN + timedelta(seconds=5)
    watched.green(-4 if catchup else 0)
    assert watched.watched == [-3 if catchup else 1]


@on_postgres_too
def test_two_runs_that_end_well_out_of_order_leave_the_message_about_the_run_after_both(watched: Watched) -> None:
    watched.arm(0)
    watched.green(1)
    assert watched.watched == [2]
    watched.green(0)
    assert watched.watched == [2]
    watched.green(2)
    watched.green(0)
    assert watched.watched == [3]


@pytest.mark.parametrize("kind", ["backfill", "manual", "asset_triggered"])
def test_a_run_that_the_schedule_has_not_made_does_nothing(watched: Watched, kind: str) -> None:
    watched.arm(0)
    watched.green(0, kind=kind)
    watched.green(3, kind=kind)
    watched.begins(0, kind=kind)
    assert watched.watched == [0]


def test_a_callback_that_comes_twice_stores_one_message(watched: Watched) -> None:
    watched.green(0)
    watched.green(0)
    assert watched.watched == [1]


def test_a_crash_between_both_steps_leaves_both_messages(watched: Watched, monkeypatch) -> None:
    watched.arm(0)
    with monkeypatch.context() as patch:

        def crash(*args: Any, **options: Any) -> None:
            raise RuntimeError("the process is killed here")

        patch.setattr(DelayedStoreHook, "take_back", crash)
        with pytest.raises(RuntimeError):
            watched.green(0)
    assert watched.watched == [0, 1]
    # the callback again, or the next good end
    watched.green(1)
    assert watched.watched == [2]


def test_where_the_next_message_cannot_be_stored_the_runs_own_stays(watched: Watched, monkeypatch) -> None:
    watched.arm(0)
    with monkeypatch.context() as patch:

        def refuse(*args: Any, **options: Any) -> None:
            raise InputError("no")

        patch.setattr(DelayedStoreHook, "arm", refuse)
        with pytest.raises(InputError):
            watched.green(0)
    assert watched.watched == [0]


def test_a_schedule_that_changes_leaves_the_message_about_the_old_one_until_a_run_ends_well(watched: Watched) -> None:
    watched.green(0)
    assert watched.watched == [1]
    start = datetime(2026, 1, 1, tzinfo=timezone.utc)
    watched.dag = DAG("etl", schedule=timedelta(hours=6), catchup=False, start_date=start)
    watched.green(5)
    assert watched.watched == [11]


def test_the_first_task_stores_the_message_about_its_own_run_where_none_waits(watched: Watched) -> None:
    watched.begins(0)
    assert watched.watched == [0]
    watched.begins(0)
    assert watched.watched == [0]
    watched.green(0)
    watched.begins(1)
    assert watched.watched == [1]
    watched.green(1)
    # it was cleared: the DAG has ended well at that time
    watched.begins(1)
    assert watched.watched == [2]


def test_a_run_that_begins_late_has_its_time_from_then_on(watched: Watched) -> None:
    before = utcnow()
    watched.begins(-5)
    (due,) = watched.due
    assert due >= before + WITHIN - timedelta(seconds=5)


def test_a_dag_that_has_ended_has_no_run_to_be_missed(watched: Watched, caplog) -> None:
    watched.dag.end_date = watched.at(1)
    watched.green(0)
    assert watched.watched == [1]
    with caplog.at_level(logging.INFO):
        watched.green(1)
    assert "the DAG has no further run that could be missed" in caplog.text
    assert watched.watched == []
    with pytest.raises(InputError, match="has no further run that could be missed"):
        watched.notifier.arm_first(watched.dag, None)


def test_the_command_stores_it_again_after_it_was_cancelled_or_delivered(watched: Watched) -> None:
    outcome, message_id, due = watched.arm(1)
    assert (outcome, due) == ("stored", watched.at(1) + WITHIN)
    assert watched.arm(1) == ("waits", message_id, due)
    watched.hook.cancel(tag="missed-run:etl")
    # a good end stores no message that a person has cancelled
    watched.green(0)
    assert watched.watched == []
    outcome, second, _ = watched.arm(1)
    assert (outcome, watched.watched) == ("stored", [1])
    assert second != message_id
    assert len(watched.delivered_until(due)) == 1
    assert watched.arm(1)[0] == "stored"
    watched.green(1)
    assert watched.arm(1)[0] == "succeeded"


def test_a_schedule_without_times_is_watched_by_every(watch) -> None:
    day = timedelta(days=1)
    watched = watch(options={"every": day, "key": "{{ params.customer }}"}, schedule=[Asset("orders")])
    for customer in ("a", "b"):
        watched.green(0, kind="asset_triggered", params={"customer": customer})
    assert watched.due == [watched.at(0) + day + WITHIN] * 2
    assert {one.tag for one in watched.hook.list()} == {"missed-run:etl@a", "missed-run:etl@b"}
    watched.green(5, kind="backfill", params={"customer": "a"})
    watched.green(3, kind="manual", params={"customer": "a"})
    # an older run that ends later
    watched.green(2, kind="manual", params={"customer": "a"})
    assert watched.due == [watched.at(0) + day + WITHIN, watched.at(3) + day + WITHIN]


def test_a_run_of_a_schedule_without_times_has_its_own_message_from_its_first_task(watch) -> None:
    watched = watch(options={"every": timedelta(days=1)}, schedule=None)
    watched.begins(1, kind="manual")
    assert watched.due == [watched.at(1) + WITHIN]
    watched.green(1, kind="manual")
    assert watched.due == [watched.at(1) + timedelta(days=1) + WITHIN]
    # the first one by the command counts from then on
    outcome, _, due = watched.notifier.arm_first(watched.dag, None, key="c")
    assert outcome == "stored"
    assert abs(due - utcnow() - timedelta(days=1) - WITHIN) < timedelta(minutes=1)


def test_the_body_can_name_the_run(watch) -> None:
    watched = watch(options={"value": "{{ dag.dag_id }} of {{ missed_run.expected_at.isoformat() }} is missed"})
    watched.green(0)
    (one,) = watched.hook.list()
    assert watched.content(one.message_id).body == f"etl of {watched.at(1).isoformat()} is missed".encode()


def test_a_body_that_cannot_be_rendered_becomes_the_default_one(watch) -> None:
    watched = watch(options={"value": "{{ nobody.knows.it }}"})
    watched.green(0)
    (one,) = watched.hook.list()
    body = json.loads(watched.content(one.message_id).body)
    assert (body["reason"], body["problem"]) == ("missed", "value= cannot be rendered (UndefinedError)")


def test_the_example_is_watched_from_its_first_task_on(
    here: Path, connect, tmp_path: Path, run_dag, monkeypatch
) -> None:
    connect("delayed_store", conn_type="sqlite", host=str(tmp_path / "store.db"))
    dags = dags_of(here / "dags/missed_run.py", monkeypatch)
    assert run_dag(dags["missed_run_install"]).state == "success"
    dag = dags["missed_run"]
    minute = utcnow().replace(second=0, microsecond=0)
    with closing(DelayedStoreHook("delayed_store")) as store:
        outcome, _, _ = dag.on_success_callback.arm_first(dag, minute)
        assert outcome == "stored"
        run = SimpleNamespace(
            dag_id=dag.dag_id, run_id=f"scheduled__{minute.isoformat()}", run_after=minute, start_date=minute
        )
        context = {"dag": dag, "run_id": run.run_id, "dag_run": run}
        dag.task_dict["work"].on_execute_callback[0](context)
        dag.on_success_callback(context)
        (one,) = store.list(tag="missed-run:missed_run")
        # the test may have gone on for some seconds into the next minute
        assert minute + timedelta(minutes=4) <= one.due_at < utcnow() + timedelta(minutes=4)
        assert [finding.code for finding in store.health()] == ["no-dispatcher", "no-service"]
