"""When a task's first try began: what relative delays count from, and what "past due" is measured by.

Two moments are kept in Airflow's task state store, whose rows live as long as the DAG run:

- the anchor, of relative delays: from the very first try on, so that a retry and a cleared task mean the same due times
  (unless ``[state_store] clear_on_success`` removes it, or a cleared task is to be another send);
- the beginning of the present send: until it has succeeded or was refused, so that a retry never refuses its own rows,
  and a task that is cleared long after it ended does not fire them again.

A task that was cleared is told from one that is tried again by its ``max_tries``, which Airflow raises when it clears a
task, by as many tries as it had, and never else. One that is cleared while it runs is only tried again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from airflow_delayed.message import utc

if TYPE_CHECKING:
    from airflow.sdk import Context

_ANCHOR = "airflow_delayed.anchor"
_BEGAN = "airflow_delayed.began"


@dataclass(frozen=True, slots=True)
class FirstTry:
    """The two moments."""

    anchor: datetime
    began: datetime


def first_try(context: Context, now: datetime, *, anew: bool = False, keep: bool = True) -> FirstTry:
    """Return when the first try began; the first call makes it so.

    :param anew: a cleared task has an anchor of its own.
    :param keep: without it nothing is written, as befits a dry run.
    """
    anchor = _of_this_turn(context, _ANCHOR) if anew else _ANCHOR
    return FirstTry(_kept(context, anchor, now, keep), _kept(context, _of_this_turn(context, _BEGAN), now, keep))


def ended(context: Context) -> None:
    """Note that the send succeeded, or was refused before anything was sent: what comes next is another send."""
    context["task_state_store"].delete(_of_this_turn(context, _BEGAN))


def turn_of(context: Context) -> str:
    """Return what all tries of a task have in common until it is cleared."""
    return f"turn {context['ti'].max_tries}"


def _of_this_turn(context: Context, key: str) -> str:
    return f"{key}, {turn_of(context)}"


def _kept(context: Context, key: str, now: datetime, keep: bool) -> datetime:
    from airflow.sdk.execution_time.context import NEVER_EXPIRE

    states = context["task_state_store"]
    kept = states.get(key)
    if isinstance(kept, str):
        return utc(key, datetime.fromisoformat(kept))
    if keep:
        states.set(key, now.isoformat(), retention=NEVER_EXPIRE)
    return now
