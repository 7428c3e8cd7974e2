"""How far a task's tries have come, kept in Airflow's task state store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_delayed.compat import NEVER_EXPIRE
from airflow_delayed.mark import Mark
from airflow_delayed.operators.first_try import mark_key, states_of
from airflow_delayed.sending import Log

if TYPE_CHECKING:
    from airflow.sdk import Context


class TaskMarks:
    """The mark of a task's send: a few counts and a digest, in JSON.

    It is kept until the send has succeeded or was refused, or for as long as the DAG run is. Before Airflow 3.3 there
    is nothing to keep it in, which is told once.

    :param anew: a cleared task is another send, with a mark of its own.
    :param log: takes what the user is to know.
    """

    def __init__(self, context: Context, log: Log, *, anew: bool = False) -> None:
        self._states = states_of(context)
        self._key = mark_key(context, anew)
        self._log = log

    def get(self) -> Mark | None:
        """Return the mark of an earlier try."""
        if self._states is None:
            self._log.info(
                "this Airflow keeps nothing from one try to the next, as 3.3 does: a retry sends all from the top, with"
                " the same ids, and refuses relative delays, for when they began is not known"
            )
            return None
        return Mark.restored(self._states.get(self._key))

    def keep(self, mark: Mark) -> None:
        """Keep a mark; if Airflow does not take it, a retry sends again what has been sent since the last."""
        if self._states is None:
            return
        try:
            self._states.set(self._key, mark.state(), retention=NEVER_EXPIRE)
        except Exception as error:
            # Airflow's own, or that of a store of states of the user's choice, whose text may say anything
            self._log.warning(
                "Airflow did not keep that %s rows are confirmed; a retry may send some again, with the same ids: %s",
                f"{mark.rows:,}",
                type(error).__name__,
            )
