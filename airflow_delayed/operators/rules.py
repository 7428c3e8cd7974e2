"""What DelayedSendOperator's arguments say of each row, as they were rendered."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.identity import scope_of
from airflow_delayed.intake.columns import Wanted
from airflow_delayed.intake.rows import RowRules
from airflow_delayed.localtime import resolve, zone
from airflow_delayed.message import delay_of, due_after, parse_time, utc
from airflow_delayed.operators.headers import headers_of
from airflow_delayed.operators.routes import origin_of
from airflow_delayed.operators.task_state import iteration_of, turn_of

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delayed.operators.send import DelayedSendOperator


def rules_of(operator: DelayedSendOperator, context: Context, anchor: datetime | None) -> tuple[Wanted, RowRules]:
    """Return which columns a task's source has, and what its arguments say for all rows.

    :param anchor: when relative delays begin; None: that is not known in this try.
    :raises InvalidMessage: an argument, as it was rendered, cannot be.
    """
    if operator.delay_from is not None:
        anchor = anchor_of(operator.delay_from, context, operator.timezone)
    elif iteration_of(context) is not None and operator.on_clear == "same_ids":
        # an iteration that replaces a cleared one looks like a first try, and would count from the clear
        anchor = None
    due_at = moment_of("due_at", operator.due_at, operator.timezone)
    if operator.delay is not None:
        due_at = due_after(anchor, delay_of(operator.delay))
    id_columns = (operator.id_columns,) if isinstance(operator.id_columns, str) else tuple(operator.id_columns or ())
    headers = {} if operator.headers is None else headers_of(operator.headers)
    if not isinstance(headers, Mapping) or not all(isinstance(part, str) for pair in headers.items() for part in pair):
        raise InvalidMessage("headers", "must be a dictionary of text to text")
    rules = RowRules(
        anchor=anchor,
        scope=scope_of(*origin_of(context).parts, *([turn_of(context)] if operator.on_clear == "new_ids" else [])),
        destination=operator.destination,
        due_at=due_at,
        headers=headers,
        message_id=operator.message_id,
        id_columns=id_columns,
        tag=operator.tag,
        expires_at=moment_of("expires_at", operator.expires_at, operator.timezone),
        zone=None if operator.timezone is None else zone(operator.timezone),
    )
    wanted = Wanted(
        destination=operator.destination is not None,
        due=due_at is not None,
        id_columns=id_columns,
        ignore_others=operator.unknown_columns == "ignore",
    )
    return wanted, rules


def moment_of(column: str, given: datetime | str | None, timezone: str | None) -> datetime | None:
    """Return a parameter that is a time.

    :param timezone: the IANA name of the zone that a time without an offset is in.
    :raises InvalidMessage: it is no time, or has neither an offset nor a zone.
    """
    if given is None:
        return None
    parsed = parse_time(column, given)
    if timezone is not None and parsed.utcoffset() is None:
        return resolve(column, parsed, zone(timezone))[0]
    return utc(column, parsed)


def anchor_of(delay_from: datetime | str, context: Context, timezone: str | None) -> datetime | None:
    """Return what relative delays count from, as ``delay_from=`` says it: "run", or a time.

    :raises InvalidMessage: it is neither.
    """
    return moment_of("delay_from", context["dag_run"].run_after if delay_from == "run" else delay_from, timezone)
