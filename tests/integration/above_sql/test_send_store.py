"""DelayedSendOperator with a store: a job that runs anew changes what waits, and sends nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.recorder import Recorder
from support.send_runs import States
from support.standing import lock, record
from support.stores import Store, Transport, message, on_postgres_too
from support.times import by_clock

from airflow_delayed import compat, hooks
from airflow_delayed.errors import AccessDenied, SendFailed, TransportUnavailable, UnsupportedOption
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.store.api import DISPATCHED
from airflow_delayed.store.records import remove_rows

MINUTE = timedelta(minutes=1)


def context(run_id: str) -> dict:
    names = {"dag_id": "d", "run_id": run_id, "task_id": "send", "map_index": -1}
    ti = SimpleNamespace(**names, max_tries=0, try_number=1, xcom_push=lambda key, value: None)
    return {"ti": ti, "task_state_store": States()}


def here(store: Store) -> Callable[..., DelayedStoreHook]:
    """Make hooks whose tables are in the schema of the test."""
    return lambda conn_id, deliver_conn_id=None, **options: store.hook(deliver_conn_id, **options)


class Job:
    """A nightly job: each run has the same ids."""

    def __init__(self, store: Store, monkeypatch) -> None:
        self.store = store
        self.broker = Recorder("broker")
        self.now = datetime.now(timezone.utc)
        monkeypatch.setattr(hooks.rabbitmq, "RabbitMQDelayHook", lambda conn_id: self.broker)
        monkeypatch.setattr(hooks.store, "DelayedStoreHook", here(store))
        self.hook = store.hook()

    def run(self, dues: dict[str, timedelta], text: str = "hush", **options):
        rows = [
            {"message_id": name, "value": text, "due_at": (self.now + due).isoformat(), "destination": "mail"}
            for name, due in dues.items()
        ]
        arguments = {"conn_id": "broker", "store_conn_id": self.store.conn_id, "messages": rows, **options}
        task = by_clock(DelayedSendOperator(task_id="send", **arguments), lambda: self.now)
        summary = task.execute(context(str(self.now)))
        return {name: summary[name] for name in ("sent", "stored", "replaced", "not_replaced", "duplicates")}

    def waiting(self) -> dict[str, timedelta]:
        return {one.message_id: one.due_at - self.start for one in self.hook.list()}


@pytest.fixture
def job(store: Store, monkeypatch, connect) -> Job:
    connect("broker", conn_type="rabbitmq", host="127.0.0.1")
    store.installed()
    job = Job(store, monkeypatch)
    job.start = job.now
    return job


def counts(**wanted: int) -> dict[str, int]:
    return {**dict.fromkeys(("sent", "stored", "replaced", "not_replaced", "duplicates"), 0), **wanted}


def test_what_is_in_the_store_stays_the_stores(job: Job):
    dues = {"soon": 5 * MINUTE, "later": 20 * MINUTE, "far": 90 * MINUTE}
    assert job.run(dues) == counts(sent=1, stored=2)
    # ten minutes later "later" is so near that it would go straight to the broker
    job.now += 10 * MINUTE
    near = {name: due - 10 * MINUTE for name, due in dues.items() if name != "soon"}
    for on_conflict in ("error", "keep", "replace"):
        assert job.run(near, on_conflict=on_conflict) == counts(duplicates=2)
    assert [one.message_id for one in job.broker.sent] == ["soon"]
    assert job.waiting() == {"later": 20 * MINUTE, "far": 90 * MINUTE}


def test_what_went_to_the_transport_at_once_is_known_as_well(job: Job):
    dues = {"a": 5 * MINUTE, "b": 10 * MINUTE}
    assert job.run(dues) == counts(sent=2)
    start = job.now
    job.now += MINUTE
    near = {name: due - MINUTE for name, due in dues.items()}
    for on_conflict in ("error", "keep", "replace"):
        assert job.run(near, on_conflict=on_conflict) == counts(duplicates=2)
    for other in (3 * MINUTE, 90 * MINUTE):
        changed = {"new": MINUTE, "a": other}
        with pytest.raises(AirflowFailException, match=r"same ids: a\. Nothing was sent"):
            job.run(changed, text="new")
    assert job.run({"a": 3 * MINUTE}, on_conflict="keep") == counts(duplicates=1)
    assert job.run({"a": 90 * MINUTE}, on_conflict="replace") == counts(not_replaced=1)
    assert job.broker.ids == ["a", "b"]
    known = job.hook.get("a")
    assert (known.state, known.destination, known.due_at) == ("dispatched", "mail", start + 5 * MINUTE)
    assert job.waiting() == {}


def test_of_a_send_that_fails_half_way_only_the_rest_is_sent_again(job: Job):
    dues = dict.fromkeys("abc", 5 * MINUTE)
    job.broker.fail_after = 1
    with pytest.raises(SendFailed):
        job.run(dues)
    assert job.store.past(job.hook) == {"a": "dispatched"}  # the third was not tried
    job.broker.refused = {"b"}
    job.broker.fail_after = None
    with pytest.raises(SendFailed):
        job.run(dues)
    assert job.store.past(job.hook) == {"a": "dispatched", "c": "dispatched"}
    job.broker.refused = set()
    assert job.run(dues) == counts(sent=1, duplicates=2)
    assert job.broker.ids == ["a", "c", "b"]  # each once


def test_a_store_that_fails_after_the_confirm_costs_a_copy_and_no_message(job: Job, monkeypatch):
    """As one that is killed there."""
    with monkeypatch.context() as broken:
        broken.setattr(DelayedStoreHook, "note_sent", unreachable)
        with pytest.raises(TransportUnavailable):
            job.run({"a": 5 * MINUTE})
    assert job.run({"a": 5 * MINUTE}) == counts(sent=1)
    assert job.broker.ids == ["a", "a"]


def unreachable(self, messages):
    raise TransportUnavailable("gone")


def test_a_note_takes_nobodys_place(job: Job):
    """Somebody else has stored it in between, and a dispatcher holds it, or it was cancelled."""
    job.run({"leased": 20 * MINUTE, "cancelled": 20 * MINUTE})
    job.hook.cancel(["cancelled"])
    until = job.hook.now() + MINUTE
    with job.hook.engine.begin() as connection:
        rows = lock(connection, job.hook.tables, "leased")
        record(connection, job.hook.tables, rows, DISPATCHED, until, Dispatcher="other", ClaimedUntil=until)
    ones = [message(name, job.now) for name in ("leased", "cancelled", "new", "new")]
    job.hook.note_sent(ones)
    assert job.store.past(job.hook) == {"leased": "dispatched", "cancelled": "cancelled", "new": "dispatched"}
    assert job.hook.get("leased").state == "in flight"


@on_postgres_too
def test_a_job_that_runs_anew_replaces_what_waits(job: Job, capsys):
    assert job.run({"a": 20 * MINUTE, "b": 90 * MINUTE, "c": 90 * MINUTE}) == counts(stored=3)
    # sooner than the hold-over, later, and as it was
    dues = {"a": 2 * MINUTE, "b": 120 * MINUTE, "c": 90 * MINUTE}
    assert job.run(dues, on_conflict="replace") == counts(replaced=2, duplicates=1)
    assert job.waiting() == dues
    assert job.broker.sent == []
    shown = capsys.readouterr().out
    assert "0 stored, 2 replaced there" in shown
    assert "hush" not in shown


def test_what_was_dispatched_or_cancelled_is_not_sent_again(job: Job, capsys):
    job.run({"sent": 20 * MINUTE, "cancelled": 20 * MINUTE, "other": 20 * MINUTE})
    remember(job, {"sent": "dispatched", "cancelled": "cancelled"})
    job.now += 10 * MINUTE
    dues = {"sent": 10 * MINUTE, "cancelled": 10 * MINUTE}
    for on_conflict in ("error", "keep", "replace"):
        assert job.run(dues, on_conflict=on_conflict) == counts(duplicates=2)
    changed = {"sent": 80 * MINUTE, "cancelled": 2 * MINUTE}
    assert job.run(changed, on_conflict="keep") == counts(duplicates=2)
    assert job.run(changed, on_conflict="replace") == counts(not_replaced=2)
    assert "2 not replaced, for they came too late or were cancelled" in capsys.readouterr().out
    assert job.broker.sent == []
    assert job.waiting() == {"other": 20 * MINUTE}


def remember(job: Job, outcomes: dict[str, str]) -> None:
    now = job.hook.now()
    with job.hook.engine.begin() as connection:
        for name, outcome in outcomes.items():
            record(connection, job.hook.tables, lock(connection, job.hook.tables, name), outcome, now)
            remove_rows(connection, job.hook.tables.messages, [name])


def test_a_clash_is_found_before_anything_is_sent(job: Job):
    job.run({"a": 20 * MINUTE})
    # also where the changed one would go straight to the broker
    for due in (2 * MINUTE, 90 * MINUTE):
        with pytest.raises(AirflowFailException, match=r"same ids: a\. Nothing was sent\. .* on_conflict='replace'"):
            job.run({"new": MINUTE, "a": due})
    assert job.broker.sent == []
    assert job.waiting() == {"a": 20 * MINUTE}


def test_a_store_that_delivers_itself(store: Store, monkeypatch):
    hook = store.installed("mail", deliver_conn_id=None)
    monkeypatch.setattr(hooks.store, "DelayedStoreHook", here(store))
    job = Job.__new__(Job)
    job.store, job.hook, job.now = store, hook, datetime.now(timezone.utc)
    options = {"conn_id": store.conn_id, "store_conn_id": None}
    assert job.run({"a": MINUTE, "b": MINUTE}, **options) == counts(stored=2)
    assert {one.origin.run_id for one in hook.list()} == {str(job.now)}
    assert job.run({"a": MINUTE, "b": -MINUTE}, on_conflict="replace", **options) == counts(replaced=1, duplicates=1)
    store.dispatcher(hook).run()
    assert [one.message_id for one in hook.list()] == ["a"]


@on_postgres_too
def test_what_stays_until_it_is_due_can_be_cancelled_until_then(job: Job):
    dues = {"due": -MINUTE, "soon": 2 * MINUTE, "later": 20 * MINUTE}
    assert job.run(dues, until_due=True, past_due="send") == counts(sent=1, stored=2)
    assert job.run(dues, until_due=True, past_due="send") == counts(duplicates=3)
    assert job.run({"ahead": 30 * MINUTE}) == counts(stored=1)
    transport = Transport(horizon=60 * MINUTE)
    # a dispatcher that takes what is due within an hour
    job.store.dispatcher(job.hook, transport, lookahead=60 * MINUTE).run()
    assert [one.message_id for one in transport.sent] == ["ahead"]
    assert job.hook.cancel(due_until=job.now + 5 * MINUTE).changed == 1
    assert job.waiting() == {"later": 20 * MINUTE}


def test_a_transport_has_no_on_conflict(connect):
    connect("broker", conn_type="rabbitmq", host="127.0.0.1")
    task = DelayedSendOperator(
        task_id="send", conn_id="broker", value="x", destination="q", delay=60, on_conflict="replace"
    )
    with pytest.raises(AirflowFailException, match="has no on_conflict; leave it out") as caught:
        task.execute(context("r"))
    assert isinstance(caught.value.__cause__, UnsupportedOption)


class RelativeSend:
    """A send with a relative delay, and a store that may take it."""

    def __init__(self, job: Job, monkeypatch) -> None:
        self.job = job
        monkeypatch.setattr(compat, "CLEAR_DELETES_STATE", True)
        self.context = context("r")

    def next_try(self, number: int, *, max_tries: int = 0, states: States | None = None, **options) -> None:
        ti = self.context["ti"]
        ti.try_number, ti.max_tries = number, max_tries
        self.context["task_state_store"] = states
        rows = [
            {"value": name, "destination": "mail", "delay_seconds": wait} for name, wait in (("a", 60), ("b", 9000))
        ]
        options = {"conn_id": "broker", "store_conn_id": self.job.store.conn_id, "messages": rows, **options}
        task = DelayedSendOperator(task_id="send", max_past=10 * 60 * MINUTE, **options)
        by_clock(task, lambda: self.job.now)
        task.execute(self.context)

    def known(self) -> int:
        return len({*(one.message_id for one in (*self.job.broker.sent, *self.job.hook.list()))})


@pytest.fixture
def relative(job: Job, monkeypatch) -> RelativeSend:
    return RelativeSend(job, monkeypatch)


@on_postgres_too
def test_a_store_keeps_what_relative_delays_count_from_over_a_clear_that_forgets(relative: RelativeSend, job: Job):
    relative.next_try(1, states=States())
    job.now += 30 * MINUTE
    # as Airflow 3.4 clears a task: its state is empty
    relative.next_try(2, max_tries=1, states=States())
    job.now += 30 * MINUTE
    # as Airflow before 3.3 retries one: it keeps no state
    relative.next_try(3, max_tries=1)
    assert relative.known() == 2
    assert job.waiting() == {one.message_id: 150 * MINUTE for one in job.hook.list()}


def test_a_run_that_is_made_anew_counts_from_its_own_first_try(relative: RelativeSend, job: Job):
    relative.next_try(1, states=States())
    job.now += 30 * MINUTE
    # the run was deleted, and triggered with the same run id
    relative.next_try(1, states=States())
    assert sorted(job.waiting().values()) == [150 * MINUTE, 180 * MINUTE]


def test_new_ids_count_from_each_clear_and_are_the_same_in_its_retries(relative: RelativeSend, job: Job):
    relative.next_try(1, states=States(), on_clear="new_ids")
    for number in (2, 3):
        job.now += 30 * MINUTE
        relative.next_try(number, max_tries=1, states=States() if number == 2 else None, on_clear="new_ids", retries=0)
    assert sorted(job.waiting().values()) == [150 * MINUTE, 180 * MINUTE]


def test_a_dry_run_keeps_nothing_in_the_store(relative: RelativeSend, job: Job):
    relative.next_try(1, states=States(), dry_run=True)
    job.now += 30 * MINUTE
    relative.next_try(1, states=States())
    assert list(job.waiting().values()) == [180 * MINUTE]


def down(*_: object, **__: object) -> None:
    raise TransportUnavailable("connection 'broker': nothing listens on that host and port")


def test_what_waits_is_stored_although_the_broker_is_away(job: Job, monkeypatch, log) -> None:
    days = {f"d{number}": number * timedelta(days=1) for number in range(1, 3001)}
    with monkeypatch.context() as broken:
        broken.setattr(job.broker, "verify", down)
        broken.setattr(job.broker, "send", down)
        assert job.run({"tomorrow": timedelta(days=1)}) == counts(stored=1)
        assert "nothing listens on that host and port. So it was not checked whether mail can receive" in log.text
        # what is due soon fails, before and after what waits
        with pytest.raises(TransportUnavailable, match="due now, or within hold_over, failed; 3,000 messages are"):
            job.run({"now": MINUTE, **days, "soon": 5 * MINUTE})
        with pytest.raises(TransportUnavailable, match=r"nothing listens on that host and port$"):
            job.run({"now": MINUTE})
    assert {one.message_id for one in job.hook.list()} == {"tomorrow", *days}
    assert job.run({"now": MINUTE, **days, "soon": 5 * MINUTE}) == counts(sent=2, duplicates=3000)
    assert job.broker.ids == ["now", "soon"]


def test_a_broker_that_refuses_the_login_is_an_error_of_the_connection(job: Job, monkeypatch) -> None:
    denied = AccessDenied("broker", ["sqs:GetQueueUrl"], "mail", "look", "no")
    monkeypatch.setattr(job.broker, "verify", Mock(side_effect=denied))
    with pytest.raises(AccessDenied):
        job.run({"tomorrow": timedelta(days=1)})
    assert list(job.hook.list()) == []


def test_another_spread_under_the_same_id_is_other_content(job):
    """The place within the span is that of the id, so that the next night finds it, and the route goes by it."""
    spread = {"spread": timedelta(hours=1), "hold_over": timedelta(0)}
    dues = {f"m{number}": timedelta(minutes=5) for number in range(20)}
    assert job.run(dues, **spread)["stored"] == 20
    stored = {one.message_id: one.due_at for one in job.hook.list()}
    assert len(set(stored.values())) == 20
    assert all(job.now + timedelta(minutes=5) <= due < job.now + timedelta(minutes=65) for due in stored.values())
    assert job.run(dues, **spread)["duplicates"] == 20
    with pytest.raises(AirflowFailException, match="other content"):
        job.run(dues, spread=timedelta(hours=2), hold_over=timedelta(0))
    assert job.run(dues, spread=timedelta(hours=2), hold_over=timedelta(0), on_conflict="replace")["replaced"] == 20
    # most of them are due beyond what goes to the broker at once
    assert job.run({"far": timedelta(0)}, spread="PT12H", hold_over=timedelta(microseconds=1))["stored"] == 1


@pytest.mark.parametrize("spread", [timedelta(seconds=-1), 60, "an hour"])
def test_a_spread_that_is_none_is_refused_before_the_run(spread):
    with pytest.raises(ValueError, match=r"spread=.* must be a timedelta or an ISO 8601 duration"):
        DelayedSendOperator(task_id="send", conn_id="broker", destination="mail", value="x", delay=5, spread=spread)
