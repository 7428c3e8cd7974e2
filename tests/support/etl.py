"""A DAG whose runs end red or green, with notifiers for them; contexts as Airflow makes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from airflow.sdk import DAG

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import Origin
from airflow_delayed.message import utcnow
from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier
from airflow_delayed.store.api import Escalation, RunAttempt, RunFailure
from support.stores import Store, Transport, message

HALF_AN_HOUR = timedelta(minutes=30)
HEADER = "airflow-escalation"


@dataclass
class Etl:
    """A DAG whose runs end red or green, with the two lines for it.

    Its runs are scheduled, in the order of their names, unless a test says otherwise.
    """

    store: Store
    hook: DelayedStoreHook
    per: str = "dag"
    began: datetime = field(default_factory=utcnow)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shared: dict[str, Any] = {"store_conn_id": self.store.conn_id, "per": self.per, **self.options}
        self.on_failure = self.notifier()
        self.on_success = DelayedCancelNotifier(**self.shared)
        self.dag = DAG("etl", schedule=None)

    def notifier(self, **options: Any) -> DelayedNotifier:
        fixed = {"conn_id": "broker", "destination": "desk", "delay": HALF_AN_HOUR, **self.shared}
        return DelayedNotifier(**{**fixed, **options})

    def context(
        self,
        run: str,
        minutes: float,
        *,
        lasted: float = 5,
        kind: str = "scheduled",
        task: str | None = None,
        map_index: int = -1,
        params: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What Airflow passes when a run ends, or a task of it, so many minutes after the test's begin.

        :param lasted: so many minutes; its attempt has started before that.
        :param task: the run goes on, and started an hour before the test.
        """
        end = self.began + timedelta(minutes=minutes)
        start = end - timedelta(minutes=lasted)
        run_after = self.began + timedelta(hours=int.from_bytes(run[:2].ljust(2).encode(), "big"))
        hour = self.began - timedelta(hours=1)
        times = {"start_date": start, "end_date": end} if task is None else {"start_date": hour, "end_date": None}
        dag_run = SimpleNamespace(dag_id="etl", run_id=run, run_type=kind, run_after=run_after, **times)
        ti = SimpleNamespace(
            id=uuid4(), task_id=task or "work", map_index=map_index, try_number=1, start_date=start, end_date=end
        )
        named = {"reason": "task_failure"} if task is None else {}
        return {"dag": self.dag, "run_id": run, "dag_run": dag_run, "ti": ti, "params": params or {}, **named}

    def red(self, run: str, minutes: float, notifier: DelayedNotifier | None = None, **options: Any) -> None:
        (notifier or self.on_failure)(self.context(run, minutes, **options))

    def green(self, run: str, minutes: float, **options: Any) -> None:
        self.on_success(self.context(run, minutes, **options))

    @property
    def waiting(self) -> list[float]:
        """When what waits is due, in minutes after the test's begin."""
        return [(one.due_at - self.began) / timedelta(minutes=1) for one in self.hook.list()]

    @property
    def stands_for(self) -> list[list[str]]:
        """The runs that each waiting message names, in the order of due time."""
        return [[one["run_id"] for one in found["latest"]] for found in self.headers]

    @property
    def headers(self) -> list[dict[str, Any]]:
        contents = [self.hook.content(one.message_id, body_limit=0) for one in self.hook.list()]
        return [json.loads(content.headers[HEADER]) for content in contents]

    @property
    def bodies(self) -> list[bytes]:
        contents = [self.hook.content(one.message_id, body_limit=10_000) for one in self.hook.list()]
        return [content.body for content in contents]

    def dispatch(self, minutes: float, transport: Transport | None = None, **options: Any) -> list[bytes]:
        """Dispatch with a lookahead, when so many minutes are over by the database's clock; returns the bodies."""
        moment = self.began + timedelta(minutes=minutes)
        transport = transport or Transport()
        options = {"lookahead": timedelta(minutes=15), "database_time": lambda connection: moment, **options}
        dispatcher = self.store.dispatcher(self.hook, transport, **options)
        dispatcher.once()
        dispatcher.close()
        return [one.body for one in transport.sent]


def _attempt(started_at: datetime) -> RunAttempt:
    return RunAttempt(name="d/r", run_id="r", tag="notifier:d/r", started_at=started_at)


def arm(store: DelayedStoreHook, started_at: datetime) -> str:
    """Arm for a failure of an attempt, without a notifier, and return what became of it."""
    failure = RunFailure(dag_id="d", run_id="r", started_at=started_at, failed_at=started_at)
    due = utcnow() + HALF_AN_HOUR
    due = message(f"e-{started_at.timestamp()}", due, tag="notifier:d/r")
    wanted = Escalation(attempt=_attempt(started_at), message=due, failure=failure, beginning="e-")
    origin = Origin(dag_id="d", run_id="r", task_id="")
    return store.arm(wanted, deliver_conn_id="broker", origin=origin)[0].value


def take_back(store: DelayedStoreHook, started_at: datetime) -> int:
    """Take back for a success of an attempt, and return how many messages were cancelled."""
    return store.take_back(_attempt(started_at), actor="d").outcomes.changed


@pytest.fixture(name="broker")
def broker_fixture(connect) -> str:
    """The connection that delivers; no notifier asks the broker itself."""
    return connect("broker", conn_type="rabbitmq", host="127.0.0.1", port=1)


@pytest.fixture(name="etl")
def etl_fixture(reachable: Store, broker: str) -> Etl:
    return Etl(reachable, reachable.installed())


@pytest.fixture(name="reachable")
def reachable_fixture(store: Store, connect, monkeypatch) -> Iterator[Store]:
    """A store whose connection leads to its schema by itself, as a user's does."""
    hook = store.installed()
    url = store.url()
    if url.get_backend_name() == "postgresql":
        schema = str(store.schema).replace('"', '""').replace(" ", r"\ ")
        monkeypatch.setenv("PGOPTIONS", f'-c search_path="{schema}"')
    if url.get_backend_name() != "mysql":
        yield store
        return
    # Airflow's own hook cannot connect to a name with blanks
    name = f"notifiers_{uuid4().hex}"
    store.sql(hook, f'CREATE DATABASE "{name}"')
    address = {"host": url.host, "port": url.port, "login": url.username, "password": url.password}
    own = Store(connect(name, conn_type="mysql", schema=name, **address))
    yield own
    own.close()
    store.sql(hook, f'DROP DATABASE "{name}"')
