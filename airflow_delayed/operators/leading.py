"""How a DelayedSendOperator waits until its first message is due within ``lead``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from airflow_delayed.delivery import Clock
from airflow_delayed.errors import Interrupted
from airflow_delayed.operators.checks import survey
from airflow_delayed.operators.task_state import FirstTry, note_waiting
from airflow_delayed.pauses import pause
from airflow_delayed.route import Route
from airflow_delayed.sending import Sending

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delayed.operators.send import DelayedSendOperator

#: A wait that is no longer is slept on the worker: to be deferred and resumed takes about as long.
BRIEF = timedelta(seconds=10)


def capped(operator: DelayedSendOperator, lead: timedelta, route: Route) -> timedelta:
    """Return the lead that the transport's own delay can make up for."""
    horizon = route.delivery.horizon
    if route.store is not None or lead <= horizon:
        return lead
    operator.log.info("lead is %s here: more than that %s does not delay by itself", horizon, operator.conn_id)
    return horizon


def wait(
    operator: DelayedSendOperator,
    context: Context,
    lead: timedelta,
    began: FirstTry,
    route: Route,
    read: Callable[[Clock], Sending],
) -> Clock:
    """Return, when the first message is due within the lead, what to take for the present.

    :param began: when the first try began.
    :param read: begins to read the rows, with what is taken for the present.
    :raises TaskDeferred: it goes on in the triggerer.
    """
    first = read(operator.clock).first_due(operator.clock() + lead)
    if first is None or (wake := first - lead) <= operator.clock():
        if not operator.only_plan:
            note_waiting(context, False)
        return operator.clock
    if operator.only_plan:
        operator.log.info("would wait until %s, which is %s before the first is due", wake.isoformat(), lead)
        return lambda: wake
    if wake - operator.clock() > BRIEF:
        # what is wrong is better known now than then, and is judged by the moment when it will be sent
        survey(operator, context, read(lambda: wake), route)
        operator.log.info(
            "waiting until %s, which is %s before the first is due; nothing is sent until then, and nothing at all"
            " if the task is marked failed meanwhile",
            wake.isoformat(),
            lead,
        )
        route.close()
        note_waiting(context, True)
        if operator.deferrable:
            from airflow_delayed.triggers.due_time import DueTimeTrigger

            operator.defer(
                trigger=DueTimeTrigger(first, lead=lead), method_name="resume", kwargs={"first_try": began.state()}
            )
    while (left := (wake - operator.clock()).total_seconds()) > 0:
        operator.sleep(pause(left))
        if operator.stopped:
            raise Interrupted(0, 0, "the task was ended while it waited")
    # the rows may have changed meanwhile
    return wait(operator, context, lead, began, route, read)
