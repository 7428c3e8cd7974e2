"""The way that a task's messages go, as its operator's arguments were rendered."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from airflow_delayed.delivery import HoldingStore, delivery_for, store_for
from airflow_delayed.errors import InputError
from airflow_delayed.identity import scope_of
from airflow_delayed.operators.task_state import iteration_of
from airflow_delayed.route import Route
from airflow_delayed.store.conflicts import OnConflict, check_on_conflict
from airflow_delayed.store.origin import Origin

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delayed.operators.send import DelayedSendOperator
    from airflow_delayed.operators.spark import DelayedSparkSendOperator


def route_of(operator: DelayedSendOperator | DelayedSparkSendOperator, context: Context, closing: ExitStack) -> Route:
    """Return who delivers a task's messages, and what waits in a store before.

    :param closing: closes what was made.
    :raises InputError: arguments, as they were rendered, do not go together.
    """
    options = {name: given for name in ("topology", "routing", "envelope") if (given := getattr(operator, name))}
    if options and operator.store_conn_id is not None:
        raise InputError(
            f"{' and '.join(options)}= cannot go with store_conn_id=, whose dispatcher delivers as the connection"
            f" says; set the extra of {operator.conn_id!r} instead"
        )
    on_conflict = _on_conflict(operator)
    if on_conflict != "error" and operator.store_conn_id in (None, operator.conn_id):
        options["on_conflict"] = on_conflict
    delivery = delivery_for(operator.conn_id, **options)
    closing.callback(delivery.close)
    if delivery.horizon == timedelta(0):
        if operator.store_conn_id is not None and operator.store_conn_id != operator.conn_id:
            raise InputError(f"connection {operator.conn_id!r} holds its messages itself; leave store_conn_id= out")
        store = cast(HoldingStore, delivery)
        store.origin = origin_of(context)
        return Route(delivery=delivery, store=store)
    if operator.store_conn_id is None:
        return Route(delivery=delivery)
    store = store_for(operator.store_conn_id, operator.conn_id, on_conflict=on_conflict)
    store.origin = origin_of(context)
    closing.callback(store.close)
    hold_over = min(operator.hold_over, delivery.horizon)
    if hold_over < operator.hold_over:
        operator.log.info(
            "hold_over is %s here: more than that %s does not delay by itself", hold_over, operator.conn_id
        )
    return Route(delivery=delivery, store=store, hold_over=hold_over)


def origin_of(context: Context) -> Origin:
    """Return the run of the task: its messages are found by it, and their ids hold it.

    An unmapped task has the map index -1 in every iteration of a task loop.
    """
    ti = context["ti"]
    map_index = -1 if ti.map_index is None else ti.map_index
    return Origin(
        dag_id=ti.dag_id,
        run_id=ti.run_id,
        task_id=ti.task_id,
        map_index=map_index,
        iteration=iteration_of(context),
    )


def way_of(operator: DelayedSendOperator) -> bytes:
    """Return what stands for the way of a task's messages: on another one, none of them has been sent."""
    names = ("conn_id", "store_conn_id", "on_conflict", "topology", "routing", "envelope")
    return scope_of(*(str(getattr(operator, name)) for name in names))


def _on_conflict(operator: DelayedSendOperator | DelayedSparkSendOperator) -> OnConflict:
    try:
        return check_on_conflict(operator.on_conflict)
    except ValueError as error:
        raise InputError(str(error)) from None
