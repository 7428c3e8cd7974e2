"""When a task's first try began: what relative delays count from, and what "past due" is measured by.

Two moments are kept in Airflow's task state store, whose rows live as long as the DAG run:

- the anchor, of relative delays: from the very first try on, so that a retry and a cleared task mean the same due times
  (unless ``[state_store] clear_on_success`` removes it);
- the beginning of the present send: until it has succeeded or was refused, so that a retry never refuses its own rows,
  and a task that is cleared long after it succeeded does not fire them again. One that is cleared while it still waited
  begins anew for the same reason: it was to send nothing.

Beside them, as long as the present send lasts, is its mark: how many rows are confirmed, see
:mod:`airflow_delayed.operators.marks`.

Where a cleared task is to be another send (``anew``), it has two moments and a mark of its own. It is told from one
that is tried again by its ``max_tries``, which Airflow raises when it clears a task, by the tries that it had, and
never else. (A task that is cleared while it runs is only tried again.)

Airflow before 3.3 has no task state store. There both moments are each try's own, a wait within it notwithstanding, and
there is no mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from airflow_delayed.compat import NEVER_EXPIRE
from airflow_delayed.mark import Mark
from airflow_delayed.message import utc

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.execution_time.context import TaskStateStoreAccessor

_ANCHOR = "airflow_delayed.anchor"
_BEGAN = "airflow_delayed.began"
#: The turn in which a task waits and has sent nothing yet.
_WAITS = "airflow_delayed.waits"
_MARK = "airflow_delayed.mark"


@dataclass(frozen=True, slots=True)
class FirstTry:
    """The two moments."""

    anchor: datetime
    began: datetime

    def state(self) -> dict[str, str]:
        """Return them as a deferred task takes them along."""
        return {"anchor": self.anchor.isoformat(), "began": self.began.isoformat()}

    @classmethod
    def restored(cls, state: Mapping[str, str]) -> FirstTry:
        """Return what a deferred task has taken along."""
        return cls(*(utc(name, datetime.fromisoformat(state[name])) for name in ("anchor", "began")))


def first_try(
    context: Context, now: datetime, *, anew: bool = False, keep: bool = True, before: FirstTry | None = None
) -> FirstTry:
    """Return when the first try began; the first call makes it so.

    :param anew: a cleared task is another send.
    :param keep: without it nothing is written, as befits a dry run.
    :param before: what was returned before this try was deferred; only Airflow before 3.3 has nothing better.
    """
    states = states_of(context)
    if states is None and before is not None:
        return before
    waited = None if states is None else states.get(_WAITS)
    if keep and waited is not None and waited != turn_of(context):
        ended(context, anew=anew)
        waits(context, False)
    anchor, began = (_key(context, key, anew) for key in (_ANCHOR, _BEGAN))
    return FirstTry(_kept(context, anchor, now, keep), _kept(context, began, now, keep))


def ended(context: Context, *, anew: bool = False) -> None:
    """Note that the send succeeded, or was refused before anything was sent: what comes next is another send."""
    states = states_of(context)
    if states is not None:
        states.delete(_key(context, _BEGAN, anew))
        states.delete(mark_key(context, anew))


def refused(context: Context, *, anew: bool = False, forget: bool = False) -> None:
    """Note that a send was refused: it is over, unless earlier tries had sent a part of it.

    Then it goes on when the task is cleared, and rows that it had not come to are as old as they were.

    :param forget: send all from the top then.
    """
    states = states_of(context)
    if states is None:
        return
    mark = Mark.restored(states.get(mark_key(context, anew)))
    if mark is None or not mark.rows:
        ended(context, anew=anew)
    elif forget:
        states.delete(mark_key(context, anew))


def waits(context: Context, does: bool) -> None:
    """Note that the task waits and has sent nothing, or that the wait is over."""
    states = states_of(context)
    if states is None:
        return
    if does:
        states.set(_WAITS, turn_of(context), retention=NEVER_EXPIRE)
    else:
        states.delete(_WAITS)


def states_of(context: Context) -> TaskStateStoreAccessor | None:
    """Return the task's state store; None before Airflow 3.3."""
    return context.get("task_state_store")


def mark_key(context: Context, anew: bool) -> str:
    """Return what the mark of the present send is kept as."""
    return _key(context, _MARK, anew)


def turn_of(context: Context) -> str:
    """Return what all tries of a task have in common until it is cleared."""
    return f"turn {context['ti'].max_tries}"


def _key(context: Context, key: str, anew: bool) -> str:
    return f"{key}, {turn_of(context)}" if anew else key


def _kept(context: Context, key: str, now: datetime, keep: bool) -> datetime:
    states = states_of(context)
    kept = None if states is None else states.get(key)
    if isinstance(kept, str):
        return utc(key, datetime.fromisoformat(kept))
    if keep and states is not None:
        states.set(key, now.isoformat(), retention=NEVER_EXPIRE)
    return now
