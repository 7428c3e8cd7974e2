"""When a task's first try began: what relative delays count from, and what "past due" is measured by.

Two moments are kept in Airflow's task state store, whose rows live as long as the DAG run:

- the anchor, of relative delays: from the very first try on, so that a retry and a cleared task mean the same due times
  (unless ``[state_store] clear_on_success`` removes it);
- the beginning of the present send: until it has succeeded or was refused, so that a retry never refuses its own rows,
  and a task that is cleared long after it succeeded does not fire them again.
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


def first_try(context: Context, now: datetime, *, keep: bool = True) -> FirstTry:
    """Return when the first try began; the first call makes it so.

    :param keep: without it nothing is written, as befits a dry run.
    """
    return FirstTry(_kept(context, _ANCHOR, now, keep), _kept(context, _BEGAN, now, keep))


def ended(context: Context) -> None:
    """Note that the send succeeded, or was refused before anything was sent: what comes next is another send."""
    context["task_state_store"].delete(_BEGAN)


def _kept(context: Context, key: str, now: datetime, keep: bool) -> datetime:
    from airflow.sdk.execution_time.context import NEVER_EXPIRE

    states = context["task_state_store"]
    kept = states.get(key)
    if isinstance(kept, str):
        return utc(key, datetime.fromisoformat(kept))
    if keep:
        states.set(key, now.isoformat(), retention=NEVER_EXPIRE)
    return now
