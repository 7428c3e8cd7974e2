"""What DelayedSendOperator's arguments say of each row, as they were rendered."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from airflow_delayed.compat import KEEPS_STATE
from airflow_delayed.errors import InvalidMessage
from airflow_delayed.identity import scope_of
from airflow_delayed.intake.columns import Wanted
from airflow_delayed.intake.rows import RowRules
from airflow_delayed.localtime import resolve, zone
from airflow_delayed.message import delay_of, due_after, parse_time, utc
from airflow_delayed.operators.first_try import turn_of

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delayed.operators.send import DelayedSendOperator


def rules_of(operator: DelayedSendOperator, context: Context, anchor: datetime | None) -> tuple[Wanted, RowRules]:
    """Return which columns a task's source has, and what its arguments say for all rows.

    :param anchor: when relative delays begin.
    :raises InvalidMessage: an argument, as it was rendered, cannot be.
    """
    if not KEEPS_STATE and _is_later_try(operator, context):
        anchor = None
    where = None if operator.timezone is None else zone(operator.timezone)

    def moment(column: str, given: datetime | str | None) -> datetime | None:
        if given is None:
            return None
        parsed = parse_time(column, given)
        if where is not None and parsed.utcoffset() is None:
            return resolve(column, parsed, where)[0]
        return utc(column, parsed)

    due_at = moment("due_at", operator.due_at)
    if operator.delay is not None:
        due_at = due_after(anchor, delay_of(operator.delay))
    id_columns = (operator.id_columns,) if isinstance(operator.id_columns, str) else tuple(operator.id_columns or ())
    headers = {} if operator.headers is None else operator.headers
    if not isinstance(headers, Mapping) or not all(isinstance(part, str) for pair in headers.items() for part in pair):
        raise InvalidMessage("headers", "must be a dictionary of text to text")
    if operator.message_id is not None and operator.message_id.strip() in ("", "None"):
        raise InvalidMessage("message_id", f"is {operator.message_id!r}; did its template render to nothing?")
    ti = context["ti"]
    rules = RowRules(
        anchor=anchor,
        scope=scope_of(
            ti.dag_id,
            ti.run_id,
            ti.task_id,
            -1 if ti.map_index is None else ti.map_index,
            *([turn_of(context)] if operator.on_clear == "new_ids" else []),
        ),
        destination=operator.destination,
        due_at=due_at,
        headers=headers,
        message_id=operator.message_id,
        id_columns=id_columns,
        tag=operator.tag,
        expires_at=moment("expires_at", operator.expires_at),
        zone=where,
    )
    wanted = Wanted(
        destination=operator.destination is not None,
        due=due_at is not None,
        id_columns=id_columns,
        ignore_others=operator.unknown_columns == "ignore",
    )
    return wanted, rules


def _is_later_try(operator: DelayedSendOperator, context: Context) -> bool:
    ti = context["ti"]
    # Airflow raises max_tries when it clears a task, by the tries that it had
    first = ti.max_tries - (operator.retries or 0) + 1 if operator.on_clear == "new_ids" else 1
    return ti.try_number > first
