"""Executing one operator without Airflow's database."""

from __future__ import annotations

import asyncio
from datetime import datetime
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from airflow.sdk.definitions.param import ParamsDict

from airflow_delayed import compat

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator


class _Outlets:
    """An event for each outlet, whatever it is."""

    def __init__(self) -> None:
        self._events: dict[str, SimpleNamespace] = {}

    def __getitem__(self, outlet: object) -> SimpleNamespace:
        return self._events.setdefault(repr(outlet), SimpleNamespace(extra={}))


def context_of(operator: BaseOperator, run_id: str, now: datetime) -> dict[str, Any]:
    """Return what Airflow gives to a task's first try, as far as a test without its database can have it."""
    dag = operator.dag if operator.has_dag() else None
    params = ParamsDict({} if dag is None else dag.params)
    params.update(operator.params)
    ti = SimpleNamespace(
        dag_id="test" if dag is None else dag.dag_id,
        run_id=run_id,
        task_id=operator.task_id,
        map_index=-1,
        try_number=1,
        max_tries=operator.retries or 0,
        xcom_push=lambda key, value: None,
    )
    run = SimpleNamespace(run_id=run_id, run_type="manual", run_after=now, logical_date=now, conf={})
    return {
        "dag": dag,
        "dag_run": run,
        "logical_date": now,
        "ds": now.date().isoformat(),
        "outlet_events": _Outlets(),
        "params": params.dump(),
        "run_id": run_id,
        "task": operator,
        "task_instance": ti,
        "task_state_store": compat.TryStates(),
        "ti": ti,
        **({} if dag is None else dag.user_defined_macros or {}),
    }


def executed(operator: BaseOperator, context: dict[str, Any]) -> Any:
    """Render, execute, and resume for as long as it is deferred."""
    operator = operator.prepare_for_execution()
    operator.render_template_fields(context)  # type: ignore[arg-type]
    method: Any = operator.execute
    arguments: dict[str, Any] = {}
    while True:
        try:
            return method(context, **arguments)
        except compat.TaskDeferred as deferred:
            payload = asyncio.run(_fired(deferred.trigger))
            method = getattr(operator, deferred.method_name)
            arguments = {**(deferred.kwargs or {}), "event": payload}


async def _fired(trigger: Any) -> Any:
    """Return what a trigger says first, made anew from what the database would keep of it."""
    path, arguments = trigger.serialize()
    module, _, name = path.rpartition(".")
    events = getattr(import_module(module), name)(**arguments).run()
    try:
        async for event in events:
            return event.payload
    finally:
        await events.aclose()
    raise AssertionError(f"{path} ended without an event")
