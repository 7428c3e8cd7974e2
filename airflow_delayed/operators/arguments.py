"""What can be wrong with DelayedSendOperator's arguments, as far as a DAG's author has written them down."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from airflow.sdk import XComArg

from airflow_delayed.compat import KEEPS_STATE, NeedsAirflow
from airflow_delayed.errors import InputError
from airflow_delayed.store.conflicts import check_on_conflict

if TYPE_CHECKING:
    from airflow_delayed.operators.send import DelayedSendOperator


def check_arguments(operator: DelayedSendOperator) -> None:
    """Check what is known when a DAG is parsed.

    :raises ValueError: an argument says nothing, or contradicts another.
    """
    _check_messages(operator)
    _check_choices(operator)
    if (operator.invalid_rows == "set_aside") != (operator.rejects is not None):
        raise ValueError("invalid_rows='set_aside' and rejects='path.jsonl' go together: the rows must not be lost")
    if operator.on_clear == "new_ids" and (operator.message_id is not None or operator.id_columns is not None):
        raise ValueError("on_clear='new_ids' has no power over ids that message_id= or id_columns= give")
    if operator.lead is not None and not KEEPS_STATE:
        raise NeedsAirflow("lead=", "3.3", "to go on as it began; a store (store_conn_id=) can hold messages before")
    spans = {"hold_over": operator.hold_over, "max_past": operator.max_past}
    for name, span in {**spans, **({} if operator.lead is None else {"lead": operator.lead})}.items():
        if not isinstance(span, timedelta) or span < timedelta(0):
            raise ValueError(f"{name}={span!r} must be a timedelta, and not negative")


def _check_messages(operator: DelayedSendOperator) -> None:
    given = [name for name in ("messages", "source", "value", "body") if getattr(operator, name) is not None]
    if len(given) != 1:
        raise ValueError(f"give one of messages=, source= and value= (or body=); given: {', '.join(given) or 'none'}")
    if operator.delay is not None and operator.due_at is not None:
        raise ValueError("delay= and due_at= say the same thing; give one of them")
    if operator.message_id is not None and (operator.messages is not None or operator.source is not None):
        raise ValueError("message_id= names one message; for many use id_columns=, or a column message_id")
    if operator.id_columns is not None and not isinstance(operator.id_columns, XComArg) and not operator.id_columns:
        raise ValueError("id_columns= is empty; leave it out to have ids made from content")
    if operator.id_columns is not None and operator.messages is None and operator.source is None:
        raise ValueError("id_columns= names columns of messages= or source=; for one message give message_id=")


def _check_choices(operator: DelayedSendOperator) -> None:
    for name, choices in (
        ("invalid_rows", ("fail", "set_aside")),
        ("past_due", ("fail", "send", "skip")),
        ("on_empty", ("warn", "fail", "skip")),
        ("unknown_columns", ("fail", "ignore")),
        ("source_format", (None, "parquet", "json")),
        ("on_clear", ("same_ids", "new_ids")),
    ):
        if getattr(operator, name) not in choices:
            raise ValueError(f"{name}={getattr(operator, name)!r} is none of {', '.join(map(repr, choices))}")
    if "{{" not in str(operator.on_conflict) and not isinstance(operator.on_conflict, XComArg):
        check_on_conflict(operator.on_conflict)


def rendered_text(name: str, value: object, *, may_be_empty: bool = False) -> str | None:
    """Return a text parameter as it was rendered; a number, as native rendering makes it, as text.

    :param may_be_empty: nothing stands for a parameter that was left out.
    :raises InputError: a template rendered to nothing, or to something that is no text.
    """
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise InputError(f"{name}= is a {type(value).__name__}, and must be text; what does its template render to?")
    if value.strip() not in ("", "None"):
        return value
    if may_be_empty:
        return None
    raise InputError(f"{name}= is {value!r}; did its template render to nothing?")
