"""Delayed: the messages that a DAG under test has sent, the clock that the test moves, and a run of one operator."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from airflow.sdk import DAG, BaseOperator

from airflow_delayed.compat import TaskDeferred, TryStates, data_interval
from airflow_delayed.delivery import delivery_for
from airflow_delayed.message import DelayedMessage, delay_of, utc, utcnow
from airflow_delayed.provider_info import LOOKAHEAD

if TYPE_CHECKING:
    import pytest

    from airflow_delayed.hooks.store import DelayedStoreHook


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedMessage(DelayedMessage):
    """A message that was sent, or that waits in a store."""

    #: The connection that delivers it; the store's own for a queue table.
    conn_id: str
    #: The store that it waits in; None: it was sent.
    store_conn_id: str | None = None

    @classmethod
    def of(cls, message: DelayedMessage, conn_id: str, store_conn_id: str | None = None) -> RecordedMessage:
        """Return a record of a message."""
        own = {field.name: getattr(message, field.name) for field in fields(DelayedMessage)}
        return cls(conn_id=conn_id, store_conn_id=store_conn_id, **own)


class Delayed:
    """The fixture ``delayed``: operators and hooks of this package run as they are, but no broker is asked.

    It records each message that is sent, as if every queue existed. Messages in a store are in a SQLite file of the
    test, and go through the store's own code. The clock stands still until the test moves it, or a sleep moves it to
    its end. A test needs no defined connection; if an environment variable ``AIRFLOW_CONN_...`` defines it, the limits
    of the transport of its type are checked.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        #: All messages handed to transports or put into queue tables, in order; each is delivered when it is due.
        self.sent: list[RecordedMessage] = []
        #: For the stand-ins: connection, table and schema of each store that was used.
        self.stores: dict[tuple[str, str, str | None], None] = {}
        self._now = utcnow().replace(microsecond=0)
        self._patch = patch
        self._runs = 0

    @property
    def now(self) -> datetime:
        """The present, in UTC: the machine's time when the test began, cut to the second, until it is moved."""
        return self._now

    def move_to(self, moment: datetime) -> None:
        """Set the clock to an aware time, also to an earlier one."""
        self._now = utc("moment", moment)

    def advance(self, span: timedelta | float) -> None:
        """Move the clock on by a timedelta or seconds."""
        self._now += delay_of(span, "span")

    def connection(self, conn_id: str, conn_type: str, **extra: object) -> str:
        """Set a connection's type, such as ``aws``, ``rabbitmq`` or ``postgres``, and return its name.

        A transport's limits count once its type is known; of a SQL connection as ``conn_id=`` the destinations are
        queue tables. A store (``store_conn_id=``) needs no type.

        :param extra: of the connection, such as ``unrestricted_delay=True``.
        """
        self._patch.setenv(variable_of(conn_id), json.dumps({"conn_type": conn_type, "extra": extra}))
        return conn_id

    @property
    def stored(self) -> list[RecordedMessage]:
        """The messages that wait in stores, by due time."""
        waiting = [message for store in self._hooks() for message in _waiting(store)]
        return sorted(waiting, key=lambda message: (message.due_at, message.message_id))

    def dispatch(self, lookahead: timedelta = timedelta(seconds=LOOKAHEAD)) -> list[RecordedMessage]:
        """Dispatch the stored messages that are due within ``lookahead``, as StoreDispatchOperator does; return them.

        None is dispatched before its transport can delay it: 870 s ahead on SQS, when it is due to a queue table.

        :raises DispatchFailed: a message was given up.
        """
        before = len(self.sent)
        for store in self._hooks():
            if names := list(dict.fromkeys(message.conn_id for message in _waiting(store))):
                store.dispatcher(names, delivery_for, lookahead=lookahead).run()
        return self.sent[before:]

    def run(self, task: BaseOperator) -> Any:
        """Execute one operator, without Airflow's database, and return its result.

        It is the first try of a new manual run at the present. Templates are rendered with Airflow's own context. Where
        the operator is deferred, its trigger runs here, and then it is resumed.

        :raises NotImplementedError: the task asks what only an Airflow with a database knows.
        """
        self._runs += 1
        with _first_try(task, self._now, f"run-{self._runs}") as context:
            return contextvars.copy_context().run(_execute, context)

    def call(self, notifier: Any, run: str) -> None:
        """Call a notifier as Airflow does when a run of this id, of a DAG ``test``, has ended just now."""
        with _first_try(BaseOperator(task_id="task"), self._now, run) as context:
            notifier(context)

    def _hooks(self) -> Iterator[DelayedStoreHook]:
        from airflow_delayed.hooks.store import DelayedStoreHook

        for conn_id, table, schema in list(self.stores):
            with closing(DelayedStoreHook(conn_id, table=table, schema=schema)) as store:
                yield store


class _NoAirflow:
    """Stands in for the process that answers a task's questions: it takes what the task pushes, and answers nothing."""

    def send(self, msg: Any) -> None:
        question = type(msg).__name__
        if question not in ("MaskSecret", "SetXCom"):
            raise NotImplementedError(f"the fixture `delayed` has no answer to {question} of a task; use dag.test()")

    async def asend(self, msg: Any) -> None:
        self.send(msg)


@contextmanager
def _first_try(task: BaseOperator, now: datetime, run_id: str) -> Iterator[dict[str, Any]]:
    """Yield the context of a task's first try in a manual run; a task of no DAG gets a DAG ``test``."""
    from airflow.sdk.api.datamodels._generated import DagRun, TIRunContext
    from airflow.sdk.execution_time.context import set_current_context
    from airflow.sdk.execution_time.supervisor import set_supervisor_comms
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    if not isinstance(task, BaseOperator):
        raise TypeError(f"{task.task_id} is mapped, so that there are several of it in a run; use dag.test() for them")
    if not task.has_dag():
        task = copy.copy(task)
        task.dag = DAG("test", schedule=None)
    begin, end = data_interval(task.dag, now)
    run: dict[str, Any] = {
        "dag_id": task.dag.dag_id,
        "run_id": run_id,
        "logical_date": now,
        "data_interval_start": begin,
        "data_interval_end": end,
        "run_after": now,
        "start_date": now,
        "end_date": None,
        "run_type": "manual",
        "state": "running",
        "consumed_asset_events": [],
        "partition_key": None,
    }
    dag_run = DagRun(**{name: value for name, value in run.items() if name in DagRun.model_fields})
    ti = RuntimeTaskInstance.model_construct(
        id=uuid4(),
        dag_id=task.dag.dag_id,
        run_id=run_id,
        task_id=task.task_id,
        map_index=-1,
        try_number=1,
        max_tries=task.retries or 0,
        start_date=now,
        task=task,
        _ti_context_from_server=TIRunContext(dag_run=dag_run, max_tries=task.retries or 0),
    )
    with set_supervisor_comms(_NoAirflow()):
        context: Any = ti.get_template_context()
        if "task_state_store" in context:
            context["task_state_store"] = TryStates()
        with set_current_context(context):
            yield context


def _execute(context: Any) -> Any:
    """Render the templates, execute, resume for as long as the task is deferred, and return the result."""
    from airflow.sdk.bases.operator import ExecutorSafeguard

    task: Any = context["task"].prepare_for_execution()
    context["task"] = context["ti"].task = task
    ExecutorSafeguard.tracker.set(task)
    task.render_template_fields(context)
    method, arguments = task.execute, dict[str, Any]()
    while True:
        try:
            return method(context, **arguments)
        except TaskDeferred as deferred:
            method = getattr(task, deferred.method_name)
            arguments = {**(deferred.kwargs or {}), "event": asyncio.run(_fired(deferred.trigger))}


async def _fired(trigger: Any) -> Any:
    """Return the payload of a trigger's first event; the trigger is made from its serialized form, as Airflow does."""
    path, arguments = trigger.serialize()
    module, _, name = path.rpartition(".")
    events = getattr(import_module(module), name)(**arguments).run()
    try:
        return (await anext(events)).payload
    finally:
        await events.aclose()


def _waiting(store: DelayedStoreHook) -> list[RecordedMessage]:
    from sqlalchemy import select

    from airflow_delayed.store.records import to_message

    with store.engine.connect() as connection:
        rows: Any = connection.execute(select(store.table)).mappings().all()
    return [RecordedMessage.of(to_message(row), row["DeliverConnId"] or store.conn_id, store.conn_id) for row in rows]


def variable_of(conn_id: str) -> str:
    """Return the environment variable that defines a connection."""
    return f"AIRFLOW_CONN_{conn_id.upper()}"
