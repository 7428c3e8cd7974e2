"""cancel_on_kill: what a killed task stored leaves the store where no retry follows, and comes again after a clear.

As Airflow's task runner does, a test calls on_kill in the middle of a send, and lets the task go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowTaskTimeout
from support.forked import PATIENCE
from support.recorder import Recorder
from support.send_runs import States
from support.standing import hold
from support.stores import Store, Transport, message, on_postgres_too
from support.times import by_clock

from airflow_delayed import hooks
from airflow_delayed.errors import DelayedError, Interrupted, SendFailed, TransportUnavailable
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.operators.send import DelayedSendOperator

MINUTE = timedelta(minutes=1)
#: Messages that are stored in one transaction here.
CHUNK = 10
COUNT = 35


class Task:
    """One task instance, its tries, and its state in Airflow."""

    def __init__(self, store: Store, broker: Recorder, *, map_index: int = -1, retries: int = 0) -> None:
        self.store = store
        self.broker = broker
        self.now = datetime.now(timezone.utc)
        self.states = States()
        self.state: object = "running"
        self.asked: list[dict] = []
        self.retries = retries
        self.ti = SimpleNamespace(
            dag_id="d",
            run_id="r",
            task_id="send",
            map_index=map_index,
            max_tries=retries,
            try_number=0,
            xcom_push=lambda key, value: None,
            get_task_states=self.states_now,
        )

    def states_now(self, **names: object) -> dict:
        self.asked.append(names)
        if isinstance(self.state, Exception):
            raise self.state
        name = "send" if self.ti.map_index < 0 else f"send_{self.ti.map_index}"
        return {} if self.state is None else {"r": {name: self.state}}

    def clear(self) -> None:
        """As Airflow clears a task that has ended: by the tries that it had."""
        self.ti.max_tries = self.ti.try_number + self.retries
        self.state = "running"

    def run(self, killed_after: int | None = None, **options: object) -> dict:
        """Run the next try; it is killed after so many of its chunks, or when all is sent (-1)."""
        self.ti.try_number += 1
        rows = [
            {"value": f"body {number}", "delay_seconds": 60 if number % 5 == 0 else 7200 + number}
            for number in range(COUNT)
        ]
        arguments = {
            "conn_id": "broker",
            "store_conn_id": self.store.conn_id,
            "destination": "mail",
            "messages": rows,
            "retries": self.retries,
            "cancel_on_kill": True,
            **options,
        }
        operator = by_clock(DelayedSendOperator(task_id="send", **arguments), lambda: self.now)
        self.operator = operator
        with pytest.MonkeyPatch.context() as patch:
            if killed_after is not None:
                self._kill(patch, operator, killed_after)
            return operator.execute({"ti": self.ti, "task_state_store": self.states})

    def _kill(self, patch: pytest.MonkeyPatch, operator: DelayedSendOperator, after: int) -> None:
        if after < 0:
            deliver = operator._deliver

            def ended(*arguments: object) -> None:
                deliver(*arguments)
                operator.on_kill()

            patch.setattr(operator, "_deliver", ended)
            return
        send, chunks = DelayedStoreHook.send, [0]

        def stored(hook: DelayedStoreHook, messages: list) -> object:
            report = send(hook, messages)
            chunks[0] += 1
            if chunks[0] == after:
                self.kill(operator)
            return report

        patch.setattr(DelayedStoreHook, "send", stored)

    def kill(self, operator: DelayedSendOperator) -> None:
        operator.on_kill()

    def waiting(self) -> set[str]:
        return {one.message_id for one in self.store.hook().list()}


@pytest.fixture
def make(store: Store, monkeypatch, connect) -> Callable[..., Task]:
    connect("broker", conn_type="rabbitmq", host="127.0.0.1")
    store.installed()
    broker = Recorder("broker")
    monkeypatch.setattr(hooks.rabbitmq, "RabbitMQDelayHook", lambda conn_id: broker)

    def hook(conn_id, deliver_conn_id=None, **options):
        return store.hook(deliver_conn_id, **options)

    monkeypatch.setattr(hooks.store, "DelayedStoreHook", hook)
    monkeypatch.setattr("airflow_delayed.sending.CHUNK", CHUNK)
    monkeypatch.setattr("airflow_delayed.sending.AT_ONCE", 5)
    # nobody kills this process, and a slow machine takes its time
    monkeypatch.setattr("airflow_delayed.operators.withdrawal.KILL_SECONDS", float(PATIENCE))
    monkeypatch.setattr("airflow_delayed.operators.withdrawal.ASKED_SECONDS", float(PATIENCE))
    return lambda **options: Task(store, broker, **options)


STORED, SENT = 28, 7


def delivered(task: Task) -> list[str]:
    """What arrives in the end: at the broker at once, and from the store."""
    transport = Transport(horizon=timedelta(days=1))
    task.store.dispatcher(task.store.hook("broker"), transport, lookahead=timedelta(hours=10)).run()
    return task.broker.ids + [one.message_id for one in transport.sent]


@on_postgres_too
@pytest.mark.parametrize("state", ["failed", "skipped", "removed", None], ids=str)
def test_marked_failed_or_deleted_all_that_it_stored_goes_and_a_clear_stores_it_again(make, capsys, state):
    task = make()
    task.state = state
    with pytest.raises(Interrupted, match="the task was ended"):
        task.run(killed_after=2)
    assert task.waiting() == set()
    sent = len(task.broker.ids)
    shown = capsys.readouterr().out
    assert f"killed when at least {sent} messages were sent, which cannot be recalled" in shown
    assert "killed, and not tried again: " in shown
    assert "body" not in shown
    task.clear()
    summary = task.run()
    assert (summary["stored"], summary["sent"] + sent, summary["duplicates"]) == (STORED, SENT, sent)
    arrived = delivered(task)
    assert (len(arrived), len(set(arrived))) == (COUNT, COUNT)


@pytest.mark.parametrize(
    "state", ["running", "restarting", "up_for_retry", "queued", RuntimeError("no server")], ids=str
)
def test_a_worker_that_shuts_down_loses_nothing_and_the_retry_stores_the_rest(make, capsys, state):
    task = make(retries=1)
    task.state = state
    with pytest.raises(Interrupted):
        task.run(killed_after=2)
    before = task.waiting()
    assert 0 < len(before) < STORED
    assert "and Airflow tries it again" in capsys.readouterr().out
    task.state = "running"
    summary = task.run()
    assert summary["stored"] == STORED - len(before)
    assert (len(task.waiting()), before <= task.waiting()) == (STORED, True)
    arrived = delivered(task)
    assert (len(arrived), len(set(arrived))) == (COUNT, COUNT)


@pytest.mark.parametrize("state", ["running", "failed", RuntimeError("no server")], ids=str)
def test_killed_in_its_last_try_what_all_tries_of_the_turn_stored_goes(make, state):
    task = make(retries=1)
    with pytest.raises(Interrupted):
        task.run(killed_after=1)
    first = task.waiting()
    assert 0 < len(first) < STORED
    task.state = state
    with pytest.raises(Interrupted):
        task.run(killed_after=2)
    assert task.waiting() == set()
    task.clear()
    task.run()
    assert len(task.waiting()) == STORED


def test_a_task_that_is_cleared_while_it_runs_is_only_tried_again(make):
    task = make()
    task.state = "restarting"
    with pytest.raises(Interrupted):
        task.run(killed_after=2)
    assert 0 < len(task.waiting()) < STORED
    task.state = "running"
    task.run()
    assert len(task.waiting()) == STORED


def test_marked_as_success_what_it_stored_stays(make, capsys):
    task = make()
    task.state = "success"
    with pytest.raises(Interrupted):
        task.run(killed_after=2)
    assert 0 < len(task.waiting()) < STORED
    assert "marked as success: what it had stored stays" in capsys.readouterr().out


def test_killed_when_all_was_sent_it_goes_too(make):
    task = make()
    task.state = "failed"
    with pytest.raises(Interrupted, match=f"{SENT} messages were sent and {STORED} stored: the task was ended"):
        task.run(killed_after=-1)
    assert task.waiting() == set()
    assert len(task.broker.ids) == SENT


def test_marked_failed_shortly_before_its_end_it_goes_although_no_signal_came(make):
    task = make()
    task.state = "failed"
    with pytest.raises(Interrupted):
        task.run()
    assert task.waiting() == set()


@pytest.mark.parametrize("state", ["running", "success", None, RuntimeError("no server")], ids=str)
def test_not_killed_all_stays(make, state):
    task = make()
    task.state = state
    assert task.run()["stored"] == len(task.waiting()) == STORED


@pytest.mark.parametrize(("retries", "left"), [(0, False), (1, True)], ids=["last try", "a retry follows"])
def test_a_time_out_is_a_kill(make, monkeypatch, retries, left):
    task = make(retries=retries)
    send, chunks = DelayedStoreHook.send, []

    def slow(hook, messages):
        chunks.append(send(hook, messages))
        if len(chunks) == 2:
            raise AirflowTaskTimeout("too long")
        return chunks[-1]

    monkeypatch.setattr(DelayedStoreHook, "send", slow)
    with pytest.raises(AirflowTaskTimeout):
        task.run()
    # Airflow calls it when the task has left execute
    task.operator.on_kill()
    assert bool(task.waiting()) is left


@pytest.mark.parametrize("on_clear", ["same_ids", "new_ids"])
def test_what_a_turn_before_stored_stays(make, on_clear):
    """With new ids each clear is another send, and with the same ids the messages are there already."""
    task = make()
    task.run(on_clear=on_clear)
    before = task.waiting()
    task.clear()
    task.state = "failed"
    with pytest.raises(Interrupted):
        task.run(killed_after=2, on_clear=on_clear)
    assert task.waiting() == before


def test_the_messages_of_others_stay(make, store: Store):
    own, neighbour = make(map_index=0), make(map_index=1)
    neighbour.run()
    store.hook().send([message("somebody's", own.now + 9 * MINUTE)])
    others = own.waiting()
    own.state = "failed"
    with pytest.raises(Interrupted):
        own.run(killed_after=2)
    assert own.waiting() == others
    assert own.asked == [{"dag_id": "d", "task_ids": ["send"], "run_ids": ["r"], "map_index": 0}]


def test_what_is_being_dispatched_is_counted_and_stays(make, monkeypatch, capsys, store: Store):
    task = make()
    task.state = "failed"
    flying = []

    def kill(operator):
        flying.append(sorted(task.waiting())[0])
        hold(store.hook(), *flying)
        operator.on_kill()

    monkeypatch.setattr(task, "kill", kill)
    with pytest.raises(Interrupted):
        task.run(killed_after=2)
    assert task.waiting() == set(flying)
    assert "1 were being dispatched and stay" in capsys.readouterr().out


def test_no_other_failure_takes_anything_out(make, monkeypatch):
    task = make()
    task.broker.fail_after = 3
    with pytest.raises(SendFailed):
        task.run()
    task.broker.fail_after = None
    task.state = "failed"
    with pytest.raises(Interrupted):
        task.run(killed_after=1, cancel_on_kill=False)
    assert task.waiting()


def test_a_store_that_is_away_or_hangs_hides_no_error_and_holds_up_nothing(make, capsys):
    end = threading.Event()

    def hang(*_: object, **__: object) -> None:
        end.wait(60)

    def away(*_: object, **__: object) -> None:
        raise TransportUnavailable("connection 'db' is away")

    for fault, says in ((away, "connection 'db' is away"), (hang, "did not answer within")):
        task = make()
        task.state = "failed"
        with pytest.MonkeyPatch.context() as patch:
            if fault is hang:
                patch.setattr("airflow_delayed.operators.withdrawal.KILL_SECONDS", 1.0)
            patch.setattr(DelayedStoreHook, "withdraw", fault)
            with pytest.raises(Interrupted):
                task.run(killed_after=1)
        shown = capsys.readouterr().out
        assert "could not be taken out of the store: " in shown
        assert says in shown
        # a clear finds it there, and loses none
        task.clear()
        task.run()
        assert len(task.waiting()) >= STORED
    end.set()


def test_a_task_state_that_cannot_be_changed_any_more_costs_no_message(make, monkeypatch):
    """As where Airflow's server is away, or takes nothing from a task that was marked failed."""
    task = make()
    task.state = "failed"

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("not running")

    with pytest.MonkeyPatch.context() as patch:

        def kill(operator):
            patch.setattr(States, "set", refused)
            patch.setattr(States, "delete", refused)
            operator.on_kill()

        patch.setattr(task, "kill", kill)
        with pytest.raises(Interrupted):
            task.run(killed_after=2)
    assert task.waiting() == set()
    task.clear()
    task.run()
    assert len(task.waiting()) == STORED


def test_cleared_a_month_later_it_sends_nothing_stale(make):
    task = make()
    task.state = "failed"
    with pytest.raises(Interrupted):
        task.run(killed_after=2)
    task.clear()
    task.now += timedelta(days=30)
    with pytest.raises(AirflowFailException, match="were due more than"):
        task.run()
    assert task.waiting() == set()


@pytest.mark.parametrize("store_conn_id", [None, "None"])
def test_without_a_store_it_is_an_error_before_anything_is_sent(make, store_conn_id):
    error = ValueError if store_conn_id is None else AirflowFailException
    with pytest.raises(
        error, match=r"cancel_on_kill=True needs a store.*what a broker has confirmed cannot be taken back"
    ):
        make().run(store_conn_id=store_conn_id)


def test_a_store_that_cannot_take_back_is_refused_at_once(make, monkeypatch):
    task = make()
    other = Recorder("other", horizon=timedelta(0))
    monkeypatch.setattr(hooks.store, "DelayedStoreHook", lambda *_, **__: other)
    with pytest.raises(AirflowFailException, match="Recorder cannot take out what was stored"):
        task.run()
    with pytest.raises(DelayedError, match="Recorder cannot take out"):
        other.withdraw(task.now, seconds=1)
    assert (other.sent, task.broker.sent) == ([], [])
