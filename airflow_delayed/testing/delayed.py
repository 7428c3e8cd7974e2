"""Delayed: the messages that a DAG under test has sent, the clock that the test moves, and a run of one operator."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
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

#: What Airflow answers to a task if nothing else was ever there: by question, the answer and its fields.
_NOTHING: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "GetPrevSuccessfulDagRun": ("PrevSuccessfulDagRunResult", {}),
    "GetPreviousDagRun": ("PreviousDagRunResult", {}),
    "GetDRCount": ("DRCount", {"count": 0}),
    "GetAssetEventByAsset": ("AssetEventsResult", {"asset_events": []}),
    "GetAssetEventByAssetAlias": ("AssetEventsResult", {"asset_events": []}),
    # both are looked up in the environment before
    "GetConnection": ("ErrorResponse", {"error": "CONNECTION_NOT_FOUND"}),
    "GetVariable": ("ErrorResponse", {"error": "VARIABLE_NOT_FOUND"}),
}


class Answers:
    """Stands in for the process that answers the questions of a task: it keeps XComs, and has nothing else."""

    def __init__(self) -> None:
        #: Serialized values by DAG, run, task and key; of a task that is not mapped, with map index -1.
        self._xcoms: dict[tuple[str, str, str, str], dict[int, Any]] = {}

    def send(self, msg: Any) -> Any:
        """Return the answer to a message of a task.

        :raises NotImplementedError: only an Airflow with a database knows the answer.
        """
        from airflow.sdk.execution_time import comms

        kind = type(msg).__name__
        if kind == "MaskSecret":
            return None
        if kind.endswith("XCom") or kind == "GetXComSequenceSlice":
            return self._xcom(kind, msg)
        if kind not in _NOTHING:
            raise NotImplementedError(
                f"the task asks Airflow by {kind}, and with the fixture `delayed` no Airflow answers that outside of"
                " dag.test(); use dag.test() for this task"
            )
        name, fields = _NOTHING[kind]
        return getattr(comms, name)(**fields)

    async def asend(self, msg: Any) -> Any:
        """Return the answer to a message of an asynchronous task."""
        return self.send(msg)

    def _xcom(self, kind: str, msg: Any) -> Any:
        from airflow.sdk.execution_time.comms import XComResult, XComSequenceSliceResult

        values = self._xcoms.setdefault((msg.dag_id, msg.run_id, msg.task_id, msg.key), {})
        if kind == "GetXComSequenceSlice":
            return XComSequenceSliceResult(root=[values[index] for index in sorted(values)][msg.start : msg.stop])
        index = -1 if msg.map_index is None else msg.map_index
        if kind == "SetXCom":
            values[index] = msg.value
        elif kind == "DeleteXCom":
            values.pop(index, None)
        else:
            return XComResult(key=msg.key, value=values.get(index))
        return None


class TaskRun:
    """The first try of a task, in a run that is only here.

    :param operator: of a DAG or of none, for which a DAG ``test`` takes the place.
    :param now: when run and task begin.
    :param run_id: the run's.
    :param answers: answers what the task asks Airflow; by default nothing was pushed before.
    :param params: of the run; they and its ``conf`` are one for Airflow.
    :param xcoms: the results of other tasks in the run, by task id.
    :param fields: fields of the run; all others are names of the context.
    """

    def __init__(
        self,
        operator: BaseOperator,
        now: datetime,
        *,
        run_id: str,
        answers: Answers | None = None,
        params: Mapping[str, Any] | None = None,
        xcoms: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        from airflow.sdk.api.datamodels._generated import DagRun, TIRunContext
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
        from airflow.sdk.execution_time.xcom import XCom

        if not isinstance(operator, BaseOperator):
            raise TypeError(
                f"{operator.task_id} is mapped, so that there are several of it in a run; use dag.test() for them"
            )
        if not operator.has_dag():
            operator = copy.copy(operator)
            operator.dag = DAG("test", schedule=None)
        self._answers = answers or Answers()
        fields["conf"] = {**(fields.get("conf") or {}), **(params or {})}
        moment = fields.get("logical_date", now)
        begin, end = (None, None) if moment is None else data_interval(operator.dag, moment)
        run = {
            "dag_id": operator.dag.dag_id,
            "run_id": run_id,
            "logical_date": moment,
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
        run.update((name, fields.pop(name)) for name in [*fields] if name in DagRun.model_fields)
        known = {name: value for name, value in run.items() if name in DagRun.model_fields}
        ti = RuntimeTaskInstance.model_construct(
            id=uuid4(),
            dag_id=operator.dag.dag_id,
            run_id=run_id,
            task_id=operator.task_id,
            map_index=-1,
            try_number=1,
            max_tries=operator.retries or 0,
            start_date=now,
            end_date=run["end_date"],
            task=operator,
            _ti_context_from_server=TIRunContext(dag_run=DagRun(**known), max_tries=operator.retries or 0),
        )
        self.context: dict[str, Any] = {}
        with self._begun():
            for task_id, value in (xcoms or {}).items():
                XCom.set("return_value", value, dag_id=operator.dag.dag_id, task_id=task_id, run_id=run_id)
            self.context.update(ti.get_template_context())
        if "task_state_store" in self.context:
            self.context["task_state_store"] = TryStates()
        self.context.update(fields)
        self._operator, self._ti = operator, ti

    def execute(self) -> Any:
        """Render the templates, execute, resume for as long as the task is deferred, and return the result.

        It may be called again, for a later try.
        """
        from airflow.sdk.bases.operator import ExecutorSafeguard

        task = self._operator.prepare_for_execution()
        self.context["task"] = self._ti.task = task

        def work() -> Any:
            ExecutorSafeguard.tracker.set(task)
            task.render_template_fields(self.context)  # type: ignore[arg-type]
            method: Any = task.execute
            arguments: dict[str, Any] = {}
            while True:
                try:
                    return method(self.context, **arguments)
                except TaskDeferred as deferred:
                    payload = asyncio.run(_fired(deferred.trigger))
                    method = getattr(task, deferred.method_name)
                    arguments = {**(deferred.kwargs or {}), "event": payload}

        with self._begun():
            result = contextvars.copy_context().run(work)
            if task.do_xcom_push and result is not None:
                if task.multiple_outputs:
                    for key, value in result.items():
                        self._ti.xcom_push(key, value)
                self._ti.xcom_push("return_value", result)
        return result

    def call(self, callbacks: Sequence[Any]) -> None:
        """Call callbacks of the task or its DAG, as of a task that has just ended."""
        self._ti.end_date = self._ti.start_date
        with self._begun():
            for callback in callbacks:
                callback(self.context)

    @contextmanager
    def _begun(self) -> Iterator[None]:
        from airflow.sdk.execution_time.context import set_current_context
        from airflow.sdk.execution_time.supervisor import set_supervisor_comms

        with set_supervisor_comms(self._answers), set_current_context(self.context):  # type: ignore[arg-type]
            yield


async def _fired(trigger: Any) -> Any:
    """Return the payload of a trigger's first event; the trigger is made from its serialized form, as Airflow does."""
    path, arguments = trigger.serialize()
    module, _, name = path.rpartition(".")
    events = getattr(import_module(module), name)(**arguments).run()
    try:
        async for event in events:
            return event.payload
    finally:
        await events.aclose()
    raise AssertionError(f"{path} ended without an event")


#: Connections that Airflow's own documentation has; others have no type until a test sets it.
_KNOWN = {"aws_default": "aws", "rabbitmq_default": "rabbitmq", "amqp_default": "amqp"}
#: The type of a connection that the test does not define: any message, any delay.
ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentMessage(DelayedMessage):
    """A message that was handed to a transport, which delivers it when it is due."""

    #: The connection that it was sent by.
    conn_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingMessage(DelayedMessage):
    """A message that waits in a store."""

    #: The store.
    store_conn_id: str
    #: The connection that delivers it in the end; the store's own for a queue table.
    conn_id: str


class Delayed:
    """The fixture ``delayed``: operators and hooks of this package run as they are, but no broker is asked.

    It records each message that is sent, as if every queue existed. Messages in a store are in a SQLite file of the
    test, and go through the store's own code. The clock stands still until the test moves it, or a sleep moves it to
    its end. A test needs no defined connection; if an environment variable ``AIRFLOW_CONN_...`` defines it, the limits
    of the transport of its type are checked.

    It does not replace a broker or a database in the hooks' other methods, nor in FifoCycleSensor.

    :param patch: undone when the test is over.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._now = utcnow().replace(microsecond=0)
        self._patch = patch
        self._sent: list[SentMessage] = []
        self._stores: dict[tuple[str, str, str | None], None] = {}
        self._runs = 0
        self._answers = Answers()

    # -- the clock -----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The present, in UTC: the machine's time when the test began, cut to the second, until it is moved."""
        return self._now

    def move_to(self, moment: datetime) -> None:
        """Set the clock.

        :param moment: aware; it may be earlier, too.
        :raises NaiveTime: it has no time zone.
        """
        self._now = utc("moment", moment)

    def advance(self, span: timedelta | float) -> None:
        """Move the clock on.

        :param span: a timedelta, or seconds.
        """
        self._now += delay_of(span, "span")

    # -- connections ---------------------------------------------------------------------------------------------------

    def connection(self, conn_id: str, conn_type: str, **extra: object) -> str:
        """Set a connection's type, such as ``aws``, ``rabbitmq`` or ``postgres``, and return its name.

        A transport's limits count, and its options may be given, once its type is known; of a SQL connection as
        ``conn_id=`` the destinations are queue tables. A store (``store_conn_id=``) needs no type.

        :param extra: of the connection, such as ``unrestricted_delay=True``.
        """
        self._define(conn_id, conn_type, extra)
        return conn_id

    def type_of(self, conn_id: str) -> str | None:
        """Return a connection's type; define the connection if it is not."""
        from airflow.sdk import BaseHook

        self.ensure(conn_id, _KNOWN.get(conn_id, ANY))
        return BaseHook.get_connection(conn_id).conn_type

    def ensure(self, conn_id: str, conn_type: str) -> None:
        """Define a connection that does not exist."""
        if _variable(conn_id) not in os.environ:
            self._define(conn_id, conn_type, {})

    def _define(self, conn_id: str, conn_type: str, extra: Mapping[str, object]) -> None:
        self._patch.setenv(_variable(conn_id), json.dumps({"conn_type": conn_type, "extra": dict(extra)}))

    # -- messages ------------------------------------------------------------------------------------------------------

    @property
    def sent(self) -> list[SentMessage]:
        """All messages handed to transports or put into queue tables, in order; each is delivered when it is due."""
        return list(self._sent)

    @property
    def stored(self) -> list[WaitingMessage]:
        """The messages that wait in stores, by due time."""
        waiting = [message for store in self._stores for message in self._in(*store)]
        return sorted(waiting, key=lambda message: (message.due_at, message.message_id))

    def arrived(self, destination: str | None = None) -> list[SentMessage]:
        """Return the messages that have arrived by now, by due time; with a destination, only those there."""
        arrived = [sent for sent in self._sent if sent.due_at <= self._now and destination in (None, sent.destination)]
        return sorted(arrived, key=lambda message: message.due_at)

    def dispatch(self, lookahead: timedelta = timedelta(seconds=LOOKAHEAD)) -> list[SentMessage]:
        """Dispatch the stored messages that are due within ``lookahead``, as StoreDispatchOperator does; return them.

        None is dispatched before its transport can delay it: 870 s ahead on SQS, when it is due to a queue table.

        :raises DispatchFailed: a message was given up.
        """
        before = len(self._sent)
        for conn_id, table, schema in list(self._stores):
            names = list(dict.fromkeys(message.conn_id for message in self._in(conn_id, table, schema)))
            if names:
                with closing(_store(conn_id, table, schema)) as store:
                    store.dispatcher(names, delivery_for, lookahead=lookahead).run()
        return self._sent[before:]

    def run(self, operator: BaseOperator, **context: Any) -> Any:
        """Execute one operator, without Airflow's database, and return its result.

        Templates are rendered with the context that Airflow's own code makes for the first try of a manual run at the
        present. Where the operator is deferred, its trigger runs here, and then it is resumed. Variables are those of
        the environment; no earlier run was there.

        :param context: what differs from that run: its fields, such as ``run_id``, ``logical_date``,
            ``data_interval_start`` or ``conf``, from which ``ds`` and others follow; ``params``, which Airflow checks;
            ``xcoms``, what other tasks returned, by task id; and further names for templates. By default each call is a
            new run. With the same ``run_id``, a task can pull what an earlier one returned or pushed.
        """
        return self._task_run(operator, context).execute()

    def call(self, callback: Any, of: BaseOperator | DAG, **context: Any) -> None:
        """Call a callback, such as a notifier, as Airflow does when a task, or a run of a DAG, has ended just now.

        :param callback: of a task or a DAG, or a list of callbacks; the value of ``on_failure_callback``, for one.
        :param of: the task, or the DAG, which it is a callback of.
        :param context: as in :meth:`run`; also ``exception`` of a task, or ``reason`` of a DAG.
        """
        callbacks = callback if isinstance(callback, Sequence) else [callback]
        if isinstance(of, BaseOperator):
            self._task_run(of, context).call(callbacks)
            return
        # Airflow passes a task along
        task = next(task for task in reversed(of.tasks) if isinstance(task, BaseOperator))
        self._task_run(task, {"end_date": self._now, **context}).call(callbacks)

    def _task_run(self, operator: BaseOperator, context: Mapping[str, Any]) -> TaskRun:
        self._runs += 1
        run: dict[str, Any] = {"run_id": f"run-{self._runs}", **context}
        return TaskRun(operator, self._now, answers=self._answers, **run)

    def note(self, conn_id: str, message: DelayedMessage) -> None:
        """Note a message that was handed to a transport."""
        self._sent.append(SentMessage(conn_id=conn_id, **fields_of(message)))  # type: ignore[arg-type]

    def opened(self, store: DelayedStoreHook) -> None:
        """Note that there is a store."""
        self._stores[store.conn_id, store.table.name, store.schema] = None

    def _in(self, conn_id: str, table: str, schema: str | None) -> list[WaitingMessage]:
        from sqlalchemy import select

        from airflow_delayed.store.records import to_message

        with closing(_store(conn_id, table, schema)) as store, store.engine.connect() as connection:
            rows = connection.execute(select(store.table)).mappings().all()
        return [
            WaitingMessage(store_conn_id=conn_id, conn_id=row["DeliverConnId"] or conn_id, **fields_of(to_message(row)))  # type: ignore[arg-type]
            for row in rows
        ]


def _variable(conn_id: str) -> str:
    return f"AIRFLOW_CONN_{conn_id.upper()}"


def _store(conn_id: str, table: str, schema: str | None) -> DelayedStoreHook:
    from airflow_delayed.hooks.store import DelayedStoreHook

    return DelayedStoreHook(conn_id, table=table, schema=schema)


def fields_of(message: DelayedMessage) -> dict[str, object]:
    """Return the fields of a DelayedMessage, without the fields of its subclasses."""
    return {field.name: getattr(message, field.name) for field in fields(DelayedMessage)}
