"""The state that a task keeps from one try to the next: when its first try began, and how far it has sent.

Two moments are kept in Airflow's task state store, whose rows live as long as the DAG run:

- the anchor of relative delays: from the very first try on, so that a retry and a cleared task mean the same due
  times;
- the beginning of the present send: until it was refused, or the task is cleared after it succeeded. So a retry never
  refuses its own rows, and a task that is cleared long after it succeeded does not fire them again.

The third entry is the send's checkpoint, see :class:`TaskCheckpoints`. The three entries outlast the success: a task
whose worker is killed before Airflow knows of it is tried again, and sends nothing.

Where a cleared task is another send (``new_ids``), it has two moments and a checkpoint of its own. A cleared task
differs from a retried one by its ``max_tries``: only a clear raises them, by the tries that the task had. (A task that
is cleared while it runs is only tried again.)

A store keeps the anchor, too, from the first try on. Without a store, two versions of Airflow lose an anchor, and no
relative delay can be kept then without ``delay_from=``:

- Before 3.3 there is no task state store. Both moments are each try's own, even if the task waits within it; a later
  try does not know the anchor, and there is no checkpoint.
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
from airflow_delayed.compat import never_expire
from airflow_delayed.delivery import DelayStore
from airflow_delayed.message import utc
from airflow_delayed.reports import Checkpoint

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.execution_time.context import TaskStateStoreAccessor

    from airflow_delayed.sending import Log

logger = logging.getLogger(__name__)

#: The key of the XCom that has a send's anchor.
ANCHOR_XCOM = "delays_count_from"
_ANCHOR = "airflow_delayed.anchor"
_BEGAN = "airflow_delayed.began"
#: The turn and the try in which all was sent.
_DONE = "airflow_delayed.done"
_CHECKPOINT = "airflow_delayed.checkpoint"
_DISPATCH = "airflow_delayed.dispatch"
_CHANGE = "airflow_delayed.change"


@dataclass(frozen=True, slots=True)
class FirstTry:
    """When a task's first try began.

    :param anchor: the time that relative delays count from; None: it is not known in this try.
    :param began: what "past due" is measured by.
    :param cleared_state: the task was cleared, and its state with it, so that ``began`` is this try's own moment.
    """

    anchor: datetime | None
    began: datetime
    cleared_state: bool = False


def load_first_try(
    context: Context,
    now: datetime,
    *,
    retries: int,
    new_ids: bool = False,
    keep: bool = True,
    store: DelayStore | None = None,
) -> FirstTry:
    """Return when the first try began; the first call notes it, and keeps the anchor in the log and an XCom.

    :param new_ids: a cleared task is another send.
    :param keep: False writes nothing, for a dry run.
    :param store: the store of the messages, if there is one; used where the state was deleted, if it keeps anchors.
    """
    ti, state = context["ti"], task_state(context)
    over = state is not None and _is_over(state, context)
    if over and keep:
        forget(context, new_ids=new_ids)
    anchor = _moment(state, _key(context, _ANCHOR, new_ids))
    began = None if over else _moment(state, _key(context, _BEGAN, new_ids))
    lost = anchor is None and _may_have_sent(context, retries, new_ids)
    kept = anchor is not None
    if not kept and ti.try_number > 1 and store is not None:
        anchor = store.anchor(turn_of(context) if new_ids else None)
    first = FirstTry(
        anchor or (None if lost else now),
        began or now,
        # before 3.3 a try has no other beginning than its own
        cleared_state=state is not None and lost,
    )
    if keep:
        if not kept and first.anchor is not None:
            _keep_anchor(context, first.anchor, store, new_ids=new_ids, known=anchor is not None)
        if began is None and state is not None:
            state.set(_key(context, _BEGAN, new_ids), first.began.isoformat(), retention=never_expire())
    return first


def _may_have_sent(context: Context, retries: int, new_ids: bool) -> bool:
    ti = context["ti"]
    if task_state(context) is None:
        # Airflow raises max_tries when it clears a task, by the tries that it had
        return bool(ti.try_number > (ti.max_tries - retries + 1 if new_ids else 1))
    cleared = ti.max_tries > retries or ti.try_number > retries + 1
    return cleared and not new_ids and _may_be_deleted()


def _keep_anchor(context: Context, anchor: datetime, store: DelayStore | None, *, new_ids: bool, known: bool) -> None:
    """Keep an anchor in the task's state and in the store; for users also in the log and an XCom."""
    ti, state = context["ti"], task_state(context)
    if not known:
        if ti.try_number > 1 and not new_ids and state is not None and _may_be_deleted():
            logger.warning(
                "try %s finds nothing of an earlier one, which was lost before it began, or was cleared while it"
                " ran; in the latter case what it had sent with a relative delay is sent again, with other ids",
                ti.try_number,
            )
        if store is not None:
            store.keep_anchor(turn_of(context) if new_ids else None, anchor)
    logger.info("relative delays count from %s", anchor.isoformat())
    ti.xcom_push(key=ANCHOR_XCOM, value=anchor.isoformat())
    if state is not None:
        state.set(_key(context, _ANCHOR, new_ids), anchor.isoformat(), retention=never_expire())


def _may_be_deleted() -> bool:
    return compat.CLEAR_DELETES_STATE or compat.conf.getboolean("state_store", "clear_on_success", fallback=False)


def _is_over(state: TaskStateStoreAccessor, context: Context) -> bool:
    """Return whether the send of this state has ended, and this try belongs to another one.

    A later try than the successful one, in the same turn, is a retry of a worker that was lost before Airflow knew of
    the success. The same try again was started by a person: ``airflow tasks test`` runs it as often as it is called.
    """
    done = state.get(_DONE)
    if not isinstance(done, Mapping):
        return False
    return done.get("turn") != turn_of(context) or done.get("try") == context["ti"].try_number


def note_success(context: Context, counts: Mapping[str, Any] | None = None) -> None:
    """Note that all was sent; a try after a clear is another send."""
    state = task_state(context)
    if state is not None:
        done: dict[str, Any] = {"turn": turn_of(context), "try": context["ti"].try_number, "counts": counts}
        state.set(_DONE, done, retention=never_expire())


def earlier_success(context: Context) -> Mapping[str, Any] | None:
    """Return the counts of an earlier try that sent all, and whose worker was lost before Airflow knew; or None."""
    state = task_state(context)
    done: Any = None if state is None else state.get(_DONE)
    if not isinstance(done, Mapping) or done.get("turn") != turn_of(context):
        return None
    counts: Mapping[str, Any] | None = done.get("counts")
    return None if done.get("try") == context["ti"].try_number else counts


def forget(context: Context, *, new_ids: bool = False) -> None:
    """Forget the beginning and the checkpoint: the next try is another send."""
    state = task_state(context)
    if state is not None:
        own = (_key(context, _BEGAN, new_ids), _key(context, _CHECKPOINT, new_ids))
        for key in (*own, _DONE):
            state.delete(key)


def note_refusal(context: Context, *, new_ids: bool = False, from_the_top: bool = False) -> None:
    """Note that a send was refused: it is over, unless earlier tries had sent a part of it.

    In that case it goes on when the task is cleared, and past due is still measured from its first try.

    :param from_the_top: send all from the top when it goes on.
    """
    state = task_state(context)
    if state is None:
        return
    checkpoint = Checkpoint.restored(state.get(_key(context, _CHECKPOINT, new_ids)))
    if checkpoint is None or not checkpoint.rows:
        forget(context, new_ids=new_ids)
    elif from_the_top:
        state.delete(_key(context, _CHECKPOINT, new_ids))


class TaskCheckpoints:
    """The checkpoint of a task's send: a few counts and a digest, in JSON.

    It is kept until the send has succeeded or was refused, or for as long as the DAG run is. Before Airflow 3.3 it
    cannot be kept, which is logged once.

    :param new_ids: a cleared task is another send, with a checkpoint of its own.
    """

    def __init__(self, context: Context, log: Log, *, new_ids: bool = False) -> None:
        self._state = task_state(context)
        self._key = _key(context, _CHECKPOINT, new_ids)
        self._log = log

    def get(self) -> Checkpoint | None:
        """Return the checkpoint of an earlier try."""
        if self._state is None:
            self._log.info(
                "this Airflow keeps nothing from one try to the next, as 3.3 does: a retry sends all from the top, with"
                " the same ids, and refuses relative delays, for when they began is not known"
            )
            return None
        return Checkpoint.restored(self._state.get(self._key))

    def keep(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint; if Airflow does not take it, a retry sends again what has been sent since the last."""
        if self._state is None:
            return
        try:
            self._state.set(self._key, checkpoint.to_json(), retention=never_expire())
        except Exception as error:
            # Airflow's own, or that of a state store of the user's choice, whose text may hold secrets
            self._log.warning(
                "Airflow did not keep that %s rows are confirmed; a retry may send some again, with the same ids: %s",
                f"{checkpoint.rows:,}",
                type(error).__name__,
            )


def first_dispatch(context: Context, now: datetime) -> tuple[datetime, bool]:
    """Return when the first try of a dispatching task began, and whether this is a later one."""
    return _first_of_turn(context, now, _DISPATCH)


def first_change(context: Context, now: datetime) -> datetime:
    """Return when the first try of a task that changes messages began; before Airflow 3.3, when this one did."""
    return _first_of_turn(context, now, _CHANGE)[0]


def _first_of_turn(context: Context, now: datetime, key: str) -> tuple[datetime, bool]:
    """Return when the first try since the task was last cleared began, and whether this is a later one.

    The same try again was started by a person, who means another one.
    """
    state = task_state(context)
    if state is None:
        return now, False
    ti, kept = context["ti"], state.get(key)
    if isinstance(kept, Mapping) and kept.get("turn") == turn_of(context) and kept.get("try") != ti.try_number:
        return utc(key, datetime.fromisoformat(str(kept["at"]))), True
    first: dict[str, Any] = {"turn": turn_of(context), "try": ti.try_number, "at": now.isoformat()}
    state.set(key, first, retention=never_expire())
    return now, False


def task_state(context: Context) -> TaskStateStoreAccessor | None:
    """Return the task's state store; None before Airflow 3.3."""
    return context.get("task_state_store")


def turn_of(context: Context) -> str:
    """Return the name of a task's turn, which all its tries share until it is cleared.

    A clear replaces the iterations of a task loop by other task instances, in another region.
    """
    ti: Any = context["ti"]
    turn = f"turn {ti.max_tries}"
    return turn if iteration_of(context) is None else f"{turn}, region {ti.region_id}"


def iteration_of(context: Context) -> int | None:
    """Return which iteration of a task loop this is, counted from 1; None outside of loops, and before Airflow 3.4."""
    loop: Any = context.get("loop")
    return None if loop is None else int(loop.index)


def _key(context: Context, key: str, new_ids: bool) -> str:
    return f"{key}, {turn_of(context)}" if new_ids else key


def _moment(state: TaskStateStoreAccessor | None, key: str) -> datetime | None:
    kept = None if state is None else state.get(key)
    return utc(key, datetime.fromisoformat(kept)) if isinstance(kept, str) else None
