"""The listener: what a person marks, and a callback that is lost, reach a DAG's notifiers; and nobody waits for it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG
from support.lengths import length

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import utcnow
from airflow_delayed.notifications.listener import (
    PATIENCE,
    TRIED,
    VISIBLE,
    ChangeQueue,
    NotifierWork,
    Pending,
    StateChange,
    StateListener,
)
from airflow_delayed.notifications.missed_run import MissedRunNotifier
from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier
from services import postgres

HOUR = timedelta(hours=1)
#: State changes that a listener takes while its store is frozen.
CHANGES = length("state changes while a store is frozen", 200, 1000)
STORE: dict[str, Any] = {"store_conn_id": "marks_store"}
QUEUE: dict[str, Any] = {"conn_id": "marks_store", "destination": "desk", "delay": HOUR, **STORE}


class Changes(ChangeQueue):
    """A queue whose changes the test works on by itself."""

    def __init__(self) -> None:
        super().__init__(NotifierWork())
        self.heard: list[StateChange] = []

    def put(self, change: StateChange) -> None:
        self.heard.append(change)


class Airflow:
    """Airflow's database with DAGs, and what its API server and scheduler do with runs."""

    def __init__(self, listener: StateListener) -> None:
        self.listener = listener
        self.dags: dict[str, Any] = {}

    def parse(self, dag: DAG) -> None:
        """Do what the DAG processor does."""
        from airflow.dag_processing.bundles.manager import DagBundlesManager
        from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
        from airflow.models.serialized_dag import SerializedDagModel

        bag = DagBag(os.devnull)
        bag.bag_dag(dag)
        DagBundlesManager().sync_bundles_to_db()
        sync_bag_to_db(bag, "dags-folder", None)
        self.dags[dag.dag_id] = SerializedDagModel.get_dag(dag.dag_id)

    def run(self, dag_id: str, name: str, state: str, *, after: datetime | None = None, kind: str = "manual") -> None:
        """Have a run in the database."""
        from airflow.utils.session import create_session
        from airflow.utils.types import DagRunTriggeredByType, DagRunType

        after = after or utcnow()
        with create_session() as session:
            run = self.dags[dag_id].create_dagrun(
                run_id=name,
                run_after=after,
                logical_date=after,
                data_interval=(after, after),
                run_type=DagRunType(kind),
                triggered_by=DagRunTriggeredByType.TEST,
                state=state,
                start_date=utcnow(),
                session=session,
            )
            if state in ("success", "failed"):
                run.end_date = utcnow()
            for ti in run.task_instances:
                ti.state, ti.start_date, ti.end_date = state, utcnow(), utcnow()

    @contextmanager
    def marking(self, dag_id: str, run_id: str, state: str, task_id: str | None = None) -> Iterator[StateChange]:
        """Mark a run or a task, as the API server does; it is committed when the block ends without an error."""
        from airflow.api_fastapi.core_api.datamodels.dag_run import DagRunMutableStates
        from airflow.api_fastapi.core_api.services.public.dag_run import patch_dag_run_state
        from airflow.api_fastapi.core_api.services.public.task_instances import _emit_state_listener_hooks
        from airflow.models.dagrun import DagRun
        from airflow.utils.session import create_session
        from airflow.utils.state import TaskInstanceState

        heard = self.listener.queue.heard
        heard.clear()
        dag = self.dags[dag_id]
        with create_session(scoped=False) as session:
            if task_id is None:
                run = session.query(DagRun).filter_by(dag_id=dag_id, run_id=run_id).one()
                patch_dag_run_state(dag=dag, dag_run=run, state=DagRunMutableStates(state), session=session)
            else:
                changed = dag.set_task_instance_state(
                    task_id=task_id, run_id=run_id, state=TaskInstanceState(state), commit=True, session=session
                )
                _emit_state_listener_hooks(changed, TaskInstanceState(state))
            yield heard[-1]

    def mark(self, dag_id: str, run_id: str, state: str, task_id: str | None = None) -> StateChange:
        with self.marking(dag_id, run_id, state, task_id) as change:
            pass
        return change

    def callback(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """Return what the DAG processor has for a callback of a run that has ended."""
        from airflow.models.dagrun import DagRun
        from airflow.utils.session import create_session

        with create_session() as session:
            run = session.query(DagRun).filter_by(dag_id=dag_id, run_id=run_id).one()
            session.expunge(run)
        return {"dag": self.dags[dag_id], "dag_run": run, "run_id": run_id, "reason": "task_failure"}


@pytest.fixture
def airflow(airflow_db: None, monkeypatch) -> Iterator[Airflow]:
    from airflow.listeners.listener import get_listener_manager

    monkeypatch.setenv("AIRFLOW__DELAYED__LISTENER", "True")
    listener = StateListener(Changes())
    get_listener_manager().add_listener(listener)
    yield Airflow(listener)
    get_listener_manager().pm.unregister(listener)


@pytest.fixture
def hook(connect: Callable[..., str], tmp_path: Path) -> Iterator[DelayedStoreHook]:
    connect("marks_store", conn_type="sqlite", host=str(tmp_path / "marks.db"))
    with closing(DelayedStoreHook("marks_store")) as store:
        store.install(["desk"], create_destinations=True)
        yield store


def etl(dag_id: str, *, store: str = "marks_store", value: str | None = None, **options: Any) -> DAG:
    queue = {**QUEUE, "conn_id": store, "store_conn_id": store}
    failed = DelayedNotifier(**queue, value=value, **options)
    ended = DelayedCancelNotifier(store_conn_id=store, **options)
    with DAG(dag_id, schedule=None, on_failure_callback=[print, failed], on_success_callback=ended) as dag:
        EmptyOperator(task_id="work")
    return dag


def waiting(hook: DelayedStoreHook) -> list[str]:
    """Return the runs that waiting messages stand for."""
    contents = [hook.content(one.message_id, body_limit=0) for one in hook.list()]
    found = [json.loads(one.headers["airflow-escalation"]) for one in contents if one is not None]
    return [failure["run_id"] for one in found for failure in one["latest"]]


def test_a_red_run_that_a_person_marks_as_success_is_taken_back_once_that_is_committed(airflow, hook) -> None:
    dag, work = etl("marked"), NotifierWork()
    airflow.parse(dag)
    airflow.run("marked", "night", "failed")
    dag.on_failure_callback[1](airflow.callback("marked", "night"))
    assert waiting(hook) == ["night"]
    with airflow.marking("marked", "night", "success") as change:
        pending = Pending(change, 0)
        # Airflow has announced it, and may still roll it back
        assert work(pending, 0) == 1
        assert waiting(hook) == ["night"]
    assert work(pending, 1) is None
    assert waiting(hook) == []


def test_a_mark_that_is_rolled_back_is_none(airflow, hook) -> None:
    dag, work = etl("rolled_back"), NotifierWork()
    airflow.parse(dag)
    airflow.run("rolled_back", "night", "failed")
    dag.on_failure_callback[1](airflow.callback("rolled_back", "night"))
    with pytest.raises(RuntimeError), airflow.marking("rolled_back", "night", "success") as change:
        raise RuntimeError("the database refuses the commit")
    assert work(Pending(change, 0), VISIBLE) is None or waiting(hook) == ["night"]
    # what is committed counts: it is red, and armed
    assert waiting(hook) == ["night"]


def test_a_run_that_a_person_marks_as_failed_is_armed_with_the_id_of_the_callback(airflow, hook) -> None:
    dag, work = etl("stopped", value="as {{ run_id }} has it"), NotifierWork()
    airflow.parse(dag)
    airflow.run("stopped", "night", "running")
    change = airflow.mark("stopped", "night", "failed")
    assert change.state == "failed"
    pending = Pending(change, 0)
    # a callback that comes in time knows more
    assert work(pending, 1) == PATIENCE - 1
    assert waiting(hook) == []
    assert work(pending, PATIENCE) is None
    (armed,) = hook.list()
    dag.on_failure_callback[1](airflow.callback("stopped", "night"))
    assert [one.message_id for one in hook.list()] == [armed.message_id]
    assert json.loads(hook.content(armed.message_id, body_limit=1000).body)["run_id"] == "night"
    # and the other way round
    work(Pending(airflow.mark("stopped", "night", "success"), 0), 0)
    assert waiting(hook) == []


def test_a_callback_that_came_in_time_keeps_its_body(airflow, hook) -> None:
    dag, work = etl("heard", value="as {{ run_id }} has it"), NotifierWork()
    airflow.parse(dag)
    airflow.run("heard", "night", "running")
    pending = Pending(airflow.mark("heard", "night", "failed"), 0)
    assert work(pending, 0) == PATIENCE
    dag.on_failure_callback[1](airflow.callback("heard", "night"))
    assert work(pending, PATIENCE) is None
    (armed,) = hook.list()
    assert hook.content(armed.message_id, body_limit=1000).body == b"as night has it"


def test_a_task_that_a_person_marks_is_armed_and_taken_back_by_itself(airflow, hook) -> None:
    work = NotifierWork()
    own: dict[str, Any] = {
        "on_failure_callback": DelayedNotifier(**QUEUE, per="task"),
        "on_success_callback": DelayedCancelNotifier(**STORE, per="task"),
    }
    with DAG("tasks", schedule=None) as dag:
        EmptyOperator(task_id="a", **own) >> EmptyOperator(task_id="b", **own)
    airflow.parse(dag)
    airflow.run("tasks", "night", "running")
    for task in ("a", "b"):
        assert work(Pending(airflow.mark("tasks", "night", "failed", task), 0), PATIENCE) is None
    tags = ["notifier:tasks/night/a/-1", "notifier:tasks/night/b/-1"]
    assert sorted(str(one.tag) for one in hook.list()) == tags
    assert work(Pending(airflow.mark("tasks", "night", "success", "b"), 0), 0) is None
    assert [one.tag for one in hook.list()] == tags[:1]


def test_a_later_scheduled_run_ends_an_earlier_ones_message_where_the_dag_says_so(airflow, hook) -> None:
    dag, work = etl("replaced", per="dag"), NotifierWork()
    airflow.parse(dag)
    first = datetime(2026, 5, 4, tzinfo=timezone.utc)
    airflow.run("replaced", "scheduled__a", "failed", after=first, kind="scheduled")
    airflow.run("replaced", "scheduled__b", "failed", after=first + HOUR, kind="scheduled")
    dag.on_failure_callback[1](airflow.callback("replaced", "scheduled__a"))
    work(Pending(airflow.mark("replaced", "scheduled__b", "success"), 0), 0)
    assert waiting(hook) == []


def test_the_good_end_of_a_run_moves_the_message_about_a_missed_one(airflow, hook) -> None:
    work = NotifierWork()
    missed = MissedRunNotifier(conn_id="marks_store", destination="desk", within=60, **STORE)
    start = datetime(2026, 1, 1, tzinfo=timezone.utc)
    with DAG("watched", schedule="@hourly", start_date=start, catchup=False, on_success_callback=missed) as dag:
        EmptyOperator(task_id="work")
    airflow.parse(dag)
    hour = utcnow().replace(minute=0, second=0, microsecond=0)
    missed.arm_first(dag, hour)
    airflow.run("watched", f"scheduled__{hour.isoformat()}", "failed", after=hour, kind="scheduled")
    pending = Pending(airflow.mark("watched", f"scheduled__{hour.isoformat()}", "success"), 0)
    assert work(pending, PATIENCE) is None
    assert waiting(hook) == [f"scheduled__{(hour + HOUR).isoformat()}"]


def test_a_run_that_was_deleted_and_a_dag_without_notifiers_are_no_errors(airflow, hook) -> None:
    with DAG("plain", schedule=None) as dag:
        EmptyOperator(task_id="work")
    airflow.parse(dag)
    airflow.parse(etl("deleted"))
    airflow.run("plain", "night", "failed")
    with pytest.raises(IndexError), airflow.marking("plain", "night", "success"):
        raise AssertionError("its runs are not heard at all")
    work = NotifierWork()
    task = {"task_id": "work", "state": "failed"}
    assert work(Pending(StateChange(dag_id="plain", run_id="night", **task), 0), PATIENCE) is None
    assert work(Pending(StateChange(dag_id="deleted", run_id="never", **task), 0), PATIENCE) is None
    assert work(Pending(StateChange(dag_id="nothing", run_id="never", state="failed"), 0), PATIENCE) is None


def test_a_store_that_refuses_is_tried_again_and_given_up_in_the_end(airflow, connect, caplog) -> None:
    connect("away_store", conn_type="postgres", host="127.0.0.1", port=1, login="a", password="s3cret", schema="b")
    airflow.parse(etl("away", store="away_store"))
    airflow.run("away", "night", "failed")
    now = [0.0]
    work = NotifierWork(lambda: now[0])
    change = airflow.mark("away", "night", "success")
    pause = work(Pending(change, 0), 0)
    assert pause is not None
    # others wait as long, and do not ask
    now[0] = 10.0
    other = Pending(airflow.mark("away", "night", "success"), 10)
    assert work(other, 0) == pause - 10
    now[0] = pause
    assert work(Pending(change, 0), TRIED) is None
    assert "the listener gives this change up" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_process_that_parses_dags_has_no_listener(airflow, monkeypatch) -> None:
    """Airflow refuses tasks with end_from_trigger=True, such as a DueTimeSensor may be, in a process with one."""
    from airflow.listeners.listener import get_listener_manager

    from airflow_delayed.notifications import listener

    get_listener_manager().pm.unregister(airflow.listener)
    mine = StateListener(Changes())
    monkeypatch.setattr(listener, "listeners", [mine])
    get_listener_manager().add_listener(mine)
    with DAG("waits", schedule=None) as dag:
        EmptyOperator(task_id="work").end_from_trigger = True
    airflow.parse(dag)
    assert listener.listeners == []
    assert not get_listener_manager().has_listeners
    get_listener_manager().add_listener(airflow.listener)


@pytest.fixture
def frozen(connect: Callable[..., str]) -> Iterator[postgres.Postgres]:
    """A PostgreSQL of its own for the store, which a test stops as SIGSTOP does."""
    with postgres.running() as server:
        parts = urlsplit(server.url)
        connect(
            "frozen_store",
            conn_type="postgres",
            host=parts.hostname,
            port=parts.port,
            login=parts.username,
            password=parts.password,
            schema=parts.path.lstrip("/"),
        )
        yield server
        _signal(server, signal.SIGCONT)


def _signal(server: postgres.Postgres, number: signal.Signals) -> None:
    """Send a signal to the server and all its processes."""
    main = server._server.pid  # type: ignore[union-attr]
    children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
    os.kill(main, number)
    for pid in map(int, children):
        # a server's process for one connection ends with it
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.timeout(300)
def test_changes_while_the_store_is_frozen_hold_nobody_up_and_none_is_lost(airflow, frozen) -> None:
    dag = etl("frozen", store="frozen_store")
    airflow.parse(dag)
    runs = [f"night-{number}" for number in range(20)]
    for name in runs:
        airflow.run("frozen", name, "failed")
    from airflow.listeners.listener import get_listener_manager

    with closing(DelayedStoreHook("frozen_store")) as store:
        store.install(["desk"], create_destinations=True)
        for name in runs:
            dag.on_failure_callback[1](airflow.callback("frozen", name))
        assert len(waiting(store)) == 20
        for name in runs:
            airflow.mark("frozen", name, "success")
        get_listener_manager().pm.unregister(airflow.listener)
        queue = ChangeQueue(NotifierWork())
        real = StateListener(queue)
        get_listener_manager().add_listener(real)
        ended = [airflow.callback("frozen", runs[number % 20])["dag_run"] for number in range(CHANGES)]
        for run in ended:
            run.dag = airflow.dags["frozen"]
        _signal(frozen, signal.SIGSTOP)
        took = []
        for run in ended:
            began = time.perf_counter()
            run.notify_dagrun_state_changed(msg="success")
            took.append(time.perf_counter() - began)
        # nothing can have been worked off, for the store does not answer
        assert (len(queue), queue.dropped) == (CHANGES, 0)
        _signal(frozen, signal.SIGCONT)
        median, longest = sorted(took)[CHANGES // 2] * 1000, max(took) * 1000
        print(f"{CHANGES:,} state changes: median {median:.3f} ms, longest {longest:.1f} ms")
        deadline = time.monotonic() + 240
        while len(queue):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert waiting(store) == []
    get_listener_manager().pm.unregister(real)
    get_listener_manager().add_listener(airflow.listener)
