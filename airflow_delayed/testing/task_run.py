"""TaskRun: one try of a task without Airflow's database, in the context that Airflow's own code makes for it."""

from __future__ import annotations

import asyncio
import contextvars
import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib import import_module
from typing import Any
from uuid import uuid4

from airflow.sdk import DAG, BaseOperator

from airflow_delayed.compat import TaskDeferred, TryStates, data_interval

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
