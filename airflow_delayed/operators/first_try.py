"""When a task's first try began: what relative delays count from, and what "past due" is measured by.

Two moments are kept in Airflow's task state store, whose rows live as long as the DAG run:

- the anchor, of relative delays: from the very first try on, so that a retry and a cleared task mean the same due
  times;
- the beginning of the present send: until it was refused, or the task is cleared after it succeeded, so that a retry
  never refuses its own rows, and a task that is cleared long after it succeeded does not fire them again. A task
  that is cleared while it still waited has a new beginning for the same reason: it was to send nothing.

Beside the beginning is the send's mark: how many rows are confirmed, see :mod:`airflow_delayed.operators.marks`. Both
outlast the success, because Airflow learns of it only afterwards: a worker that is killed in between is tried again,
finds all rows confirmed, and sends none of them again.

Where a cleared task is to be another send (``anew``), it has two moments and a mark of its own. It is told from one
that is tried again by its ``max_tries``, which Airflow raises when it clears a task, by the tries that it had, and
never else. (A task that is cleared while it runs is only tried again.)

A store keeps the anchor, too, from the first try on. Without a store, two versions of Airflow lose an anchor, and no
relative delay can be kept then without ``delay_from=``:

- Before 3.3 there is no task state store. Both moments are each try's own, a wait within it notwithstanding; a later
  try does not know the anchor, and there is no mark.
- From 3.4 on, a clear deletes the task's state, unless "keep task state" is chosen, and ``[state_store]
  clear_on_success`` deletes it on any version. A task that was cleared and has no anchor may have sent before, then;
  how much of it, nobody knows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow_delayed import compat
from airflow_delayed.compat import NEVER_EXPIRE
from airflow_delayed.delivery import DelayStore
from airflow_delayed.mark import Mark
from airflow_delayed.message import utc

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.execution_time.context import TaskStateStoreAccessor

logger = logging.getLogger(__name__)

#: The key of the XCom that has a send's anchor.
ANCHOR_XCOM = "delays_count_from"
_ANCHOR = "airflow_delayed.anchor"
_BEGAN = "airflow_delayed.began"
#: The turn in which a task waits and has sent nothing yet.
_WAITS = "airflow_delayed.waits"
#: The turn and the try in which all was sent.
_DONE = "airflow_delayed.done"
_MARK = "airflow_delayed.mark"
_DISPATCH = "airflow_delayed.dispatch"


@dataclass(frozen=True, slots=True)
class FirstTry:
    """The two moments.

    :param anchor: what relative delays count from; None: it is not known in this try.
    :param began: what "past due" is measured by.
    :param cleared_state: the task was cleared, and its state with it, so that ``began`` is this try's own moment.
    """

    anchor: datetime | None
    began: datetime
    cleared_state: bool = False

    def state(self) -> dict[str, Any]:
        """Return them as a deferred task takes them along."""
        anchor = None if self.anchor is None else self.anchor.isoformat()
        return {"anchor": anchor, "began": self.began.isoformat(), "cleared_state": self.cleared_state}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> FirstTry:
        """Return what a deferred task has taken along."""
        anchor = None if state["anchor"] is None else utc("anchor", datetime.fromisoformat(state["anchor"]))
        return cls(anchor, utc("began", datetime.fromisoformat(state["began"])), state["cleared_state"])


def first_try(
    context: Context,
    now: datetime,
    *,
    retries: int,
    anew: bool = False,
    keep: bool = True,
    before: FirstTry | None = None,
    store: DelayStore | None = None,
) -> FirstTry:
    """Return when the first try began; the first call makes it so, and logs and keeps the anchor as an XCom.

    :param retries: of the task, as its DAG has them now.
    :param anew: a cleared task is another send.
    :param keep: without it nothing is written, as befits a dry run.
    :param before: what was returned before this try was deferred; it stands in where the state is gone.
    :param store: the store of the messages, if there is one; where it keeps anchors, it stands in for the state.
    """
    ti, states = context["ti"], states_of(context)
    over = states is not None and _is_over(states, context)
    if over and keep:
        forget(context, anew=anew)
    anchor = _kept(states, _key(context, _ANCHOR, anew))
    began = None if over else _kept(states, _key(context, _BEGAN, anew))
    if anchor is None and before is not None:
        anchor, began = before.anchor, began or before.began
    lost = anchor is None and _may_have_sent(context, retries, anew)
    kept = anchor is not None
    if not kept and ti.try_number > 1 and store is not None:
        anchor = store.anchor(turn_of(context) if anew else None)
    found = FirstTry(
        anchor or (None if lost else now),
        began or now,
        # before 3.3 a try has no other beginning than its own
        cleared_state=states is not None and (lost or (before is not None and before.cleared_state)),
    )
    if keep:
        if not kept and found.anchor is not None:
            _keep(context, found.anchor, store, anew=anew, known=anchor is not None)
        if began is None and states is not None:
            states.set(_key(context, _BEGAN, anew), found.began.isoformat(), retention=NEVER_EXPIRE)
    return found


def _may_have_sent(context: Context, retries: int, anew: bool) -> bool:
    """Return whether earlier tries may have sent messages whose anchor this try does not find in Airflow."""
    ti = context["ti"]
    if states_of(context) is None:
        # Airflow raises max_tries when it clears a task, by the tries that it had
        return bool(ti.try_number > (ti.max_tries - retries + 1 if anew else 1))
    cleared = ti.max_tries > retries or ti.try_number > retries + 1
    return cleared and not anew and _may_be_deleted()


def _keep(context: Context, anchor: datetime, store: DelayStore | None, *, anew: bool, known: bool) -> None:
    """Keep an anchor in the task's state and in the store, and say it where a user finds it: in the log and an XCom.

    :param known: the store has it.
    """
    ti, states = context["ti"], states_of(context)
    if not known:
        if ti.try_number > 1 and not anew and states is not None and _may_be_deleted():
            logger.warning(
                "try %s finds nothing of an earlier one, which was lost before it began, or was cleared while it"
                " ran; in the latter case what it had sent with a relative delay is sent again, with other ids",
                ti.try_number,
            )
        if store is not None:
            store.keep_anchor(turn_of(context) if anew else None, anchor)
    logger.info("relative delays count from %s", anchor.isoformat())
    ti.xcom_push(key=ANCHOR_XCOM, value=anchor.isoformat())
    if states is not None:
        states.set(_key(context, _ANCHOR, anew), anchor.isoformat(), retention=NEVER_EXPIRE)


def _may_be_deleted() -> bool:
    return compat.CLEAR_DELETES_STATE or compat.conf.getboolean("state_store", "clear_on_success", fallback=False)


def _is_over(states: TaskStateStoreAccessor, context: Context) -> bool:
    """Return whether the send that the states are of has ended, and this try is of another one.

    A later try than the successful one, in the same turn, is a retry of a worker that was lost before Airflow knew of
    the success. The same try again is a person's: ``airflow tasks test`` runs it as often as it is called.
    """
    waited, done = states.get(_WAITS), states.get(_DONE)
    if waited is not None and waited != turn_of(context):
        return True
    if not isinstance(done, Mapping):
        return False
    return done.get("turn") != turn_of(context) or done.get("try") == context["ti"].try_number


def succeeded(context: Context, counts: Mapping[str, Any] | None = None) -> None:
    """Note that all was sent; what follows a clear is another send.

    :param counts: what :func:`earlier_success` returns in a later try.
    """
    states = states_of(context)
    if states is not None:
        done: dict[str, Any] = {"turn": turn_of(context), "try": context["ti"].try_number, "counts": counts}
        states.set(_DONE, done, retention=NEVER_EXPIRE)


def earlier_success(context: Context) -> Mapping[str, Any] | None:
    """Return the counts of an earlier try that sent all, and whose worker was lost before Airflow knew; or None."""
    states = states_of(context)
    done: Any = None if states is None else states.get(_DONE)
    if not isinstance(done, Mapping) or done.get("turn") != turn_of(context):
        return None
    counts: Mapping[str, Any] | None = done.get("counts")
    return None if done.get("try") == context["ti"].try_number else counts


def forget(context: Context, *, anew: bool = False) -> None:
    """Forget the beginning and the mark: what comes next is another send."""
    states = states_of(context)
    if states is not None:
        for key in (_key(context, _BEGAN, anew), mark_key(context, anew), _WAITS, _DONE):
            states.delete(key)


def refused(context: Context, *, anew: bool = False, from_the_top: bool = False) -> None:
    """Note that a send was refused: it is over, unless earlier tries had sent a part of it.

    Then it goes on when the task is cleared, and rows that it had not come to are as old as they were.

    :param from_the_top: send all from the top then.
    """
    states = states_of(context)
    if states is None:
        return
    mark = Mark.restored(states.get(mark_key(context, anew)))
    if mark is None or not mark.rows:
        forget(context, anew=anew)
    elif from_the_top:
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


def first_dispatch(context: Context, now: datetime) -> tuple[datetime, bool]:
    """Return when the first try of a dispatching task began, and whether this is a later one.

    :param now: by the store's clock.
    """
    states = states_of(context)
    if states is None:
        return now, False
    ti, kept = context["ti"], states.get(_DISPATCH)
    if isinstance(kept, Mapping) and kept.get("turn") == turn_of(context) and kept.get("try") != ti.try_number:
        return utc(_DISPATCH, datetime.fromisoformat(str(kept["at"]))), True
    first: dict[str, Any] = {"turn": turn_of(context), "try": ti.try_number, "at": now.isoformat()}
    states.set(_DISPATCH, first, retention=NEVER_EXPIRE)
    return now, False


def states_of(context: Context) -> TaskStateStoreAccessor | None:
    """Return the task's state store; None before Airflow 3.3."""
    return context.get("task_state_store")


def mark_key(context: Context, anew: bool) -> str:
    """Return what the mark of the present send is kept as."""
    return _key(context, _MARK, anew)


def turn_of(context: Context) -> str:
    """Return what all tries of a task have in common until it is cleared.

    A clear replaces the iterations of a task loop by other task instances, in another region.
    """
    ti: Any = context["ti"]
    turn = f"turn {ti.max_tries}"
    return turn if iteration_of(context) is None else f"{turn}, region {ti.region_id}"


def iteration_of(context: Context) -> int | None:
    """Return which iteration of a task loop this is, counted from 1; None outside of loops, and before Airflow 3.4."""
    loop: Any = context.get("loop")
    return None if loop is None else int(loop.index)


def _key(context: Context, key: str, anew: bool) -> str:
    return f"{key}, {turn_of(context)}" if anew else key


def _kept(states: TaskStateStoreAccessor | None, key: str) -> datetime | None:
    kept = None if states is None else states.get(key)
    return utc(key, datetime.fromisoformat(kept)) if isinstance(kept, str) else None
