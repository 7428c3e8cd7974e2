"""The withdrawal: what a killed task has stored is taken out of its store, unless Airflow tries the task again.

Airflow sends the task's process a signal (``on_kill``), lets it go on, and kills it after 5 seconds. It does so when a
person marks the task or its run, clears the task or deletes the run; when a worker shuts down; and when its own server
has not answered the worker for long. The signal looks the same each time, so the task's state is asked for. Where a
retry follows, the messages stay: they would be late if the retry had to store them again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from airflow_delayed.compat import AirflowTaskTimeout
from airflow_delayed.delivery import DelayStore
from airflow_delayed.errors import InputError, explained
from airflow_delayed.hooks.store import result_of
from airflow_delayed.operators.task_state import forget, stored_since
from airflow_delayed.threads import in_thread

if TYPE_CHECKING:
    from airflow.sdk import Context
    from typing_extensions import Self

    from airflow_delayed.sending import Log

#: Seconds from the signal until all is done, so that the log has it before Airflow kills the process.
KILL_SECONDS = 4.0
#: Seconds of these to wait for the task's state.
ASKED_SECONDS = 1.5
#: States of a task that was ended by a person, and is not tried again.
_MARKED = ("failed", "skipped", "removed", "upstream_failed")
#: States that say nothing of a retry: its tries do. Airflow's server may not have answered.
_OPEN = ("running", "unknown")


class Withdrawal:
    """Takes out what a send has stored, when it is left after the task was killed; a context manager.

    Only what the tries of this turn have stored: what a task that was cleared had stored before stays. The ids are not
    remembered as a cancel's are, so that the task can store the same messages when a person clears it.

    :param store: the store of the send, with its run.
    :raises InputError: that store cannot do it.
    """

    def __init__(
        self,
        context: Context,
        store: DelayStore,
        log: Log,
        *,
        new_ids: bool,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if getattr(type(store), "withdraw", DelayStore.withdraw) is DelayStore.withdraw:
            raise InputError(
                f"cancel_on_kill=True: {type(store).__name__} cannot take out what was stored; leave it out"
            )
        self._context = context
        self._store = store
        self._log = log
        self._new_ids = new_ids
        self._monotonic = monotonic
        self._since = stored_since(context, store.now)
        self._killed_at: float | None = None

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take out what was stored if the task was killed, or has run into its ``execution_timeout``."""
        if self._killed_at is not None or isinstance(error, AirflowTaskTimeout):
            self.note_kill()
            try:
                self._run()
            except Exception as problem:
                # the task's own error is the one to raise
                self._log.warning(
                    "killed, and what it had stored could not be taken out of the store: %s. Cancel it by its run (on"
                    " the page, or DelayedCancelOperator(sent_by=...))",
                    explained(problem),
                )

    def note_kill(self) -> None:
        """Note Airflow's signal."""
        if self._killed_at is None:
            self._killed_at = self._monotonic()

    def killed(self) -> bool:
        """Return whether the task was killed, or is about to be: the signal comes seconds after the mark."""
        if self._killed_at is None and self._state() in _MARKED:
            self.note_kill()
        return self._killed_at is not None

    def _run(self) -> None:
        state = self._state()
        if state == "success":
            self._log.warning("killed, and marked as success: what it had stored stays in the store")
            return
        ti = self._context["ti"]
        over = state is None or state in _MARKED
        if not over and (state not in _OPEN or ti.try_number <= ti.max_tries):
            self._log.warning(
                "killed, and Airflow tries it again (its state is %s): what it had stored stays in the store, for the"
                " next try goes on with the same messages",
                state,
            )
            return
        assert self._killed_at is not None
        left = max(1.0, KILL_SECONDS - (self._monotonic() - self._killed_at))
        # a clear is another send then, which refuses what has fallen due until that
        forgotten = in_thread(lambda: forget(self._context, new_ids=self._new_ids))
        because = f"the task was killed, its state is {state}"
        answer = in_thread(lambda: self._store.withdraw(self._since, seconds=left * 3 / 4, because=because))
        wait([answer], left)
        report = result_of(answer, left, self._store.conn_id)
        self._log.warning(
            "killed, and not tried again: %s messages that it had stored are out of the store, %s were being dispatched"
            " and stay; when it is cleared, it stores them again%s",
            f"{report.withdrawn:,}",
            f"{report.in_flight:,}",
            "" if report.complete else ". There was no time for all of them: cancel the others by their run",
        )
        wait([forgotten], max(0.0, KILL_SECONDS - (self._monotonic() - self._killed_at)))

    def _state(self) -> str | None:
        """Return the task's state in Airflow; None: Airflow has no such task; "unknown": it does not answer."""
        ti = self._context["ti"]
        answer = in_thread(
            lambda: ti.get_task_states(
                dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=ti.map_index
            )
        )
        wait([answer], ASKED_SECONDS)
        with suppress(Exception):
            states = answer.result(timeout=0).get(ti.run_id, {})
            # a mapped task has its index in its name
            return next((str(state or "cleared") for state in states.values()), None)
        return "unknown"
