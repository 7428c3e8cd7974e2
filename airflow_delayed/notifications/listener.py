"""The listener of the plugin, off by default: it lets a DAG's notifiers hear what calls none of Airflow's callbacks.

That is above all the state that a person sets. Airflow calls a listener in the scheduler and in the API server, before
the state is committed, and waits for it. So :class:`StateListener` only puts the change into a queue. A thread reads
the committed state, and lets the notifiers of the DAG work as in a callback, with the same ids: of callback and thread
the second finds that all is done.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import logging
import math
import os
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Condition, Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from airflow.listeners import hookimpl

from airflow_delayed import metrics
from airflow_delayed.compat import conf
from airflow_delayed.errors import DelayedError, TransportUnavailable, explained
from airflow_delayed.notifications.dag_notifiers import NOTIFIERS, kept_notifiers
from airflow_delayed.notifications.store_calls import calls_of
from airflow_delayed.threads import start_thread

if TYPE_CHECKING:
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import TaskInstance

    from airflow_delayed.notifications.notifiers import StoreNotifier

log = logging.getLogger(__name__)

#: The changes that may wait; further ones are dropped.
LIMIT = 10_000
#: After so many further drops there is a line in the log again.
LOGGED_DROPS = 1000
#: Seconds without work after which the thread lets go of connections.
IDLE = 10.0
#: Seconds that the thread has at the end of the process.
AT_EXIT = 5.0
#: Seconds between two looks for a state that is not committed yet; and after so many, what is committed counts.
LOOK, VISIBLE = 1.0, 60.0
#: Seconds for which a DAG need not be read again.
FRESH = 10.0
#: Seconds that a callback has to come, before a message is stored in its place: the callback knows more of a failure.
PATIENCE = 30.0
#: Seconds between two tries of a store that does not answer, and for how many it is tried.
SILENCE, TRIED = 35.0, 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """A run, or a task instance of it, that Airflow is about to give a final state."""

    dag_id: str
    run_id: str
    #: None: the run itself.
    task_id: str | None = None
    map_index: int = -1
    #: "success" or "failed".
    state: str
    #: Airflow's serialized DAG, where the caller has it at hand.
    dag: Any = field(default=None, compare=False)

    def __str__(self) -> str:
        task = "" if self.task_id is None else f", task {self.task_id}"
        return f"DAG {self.dag_id}, run {self.run_id}{task}, {self.state}"


@dataclass(slots=True)
class Pending:
    """A change that waits in the queue.

    :param heard_at: by the queue's clock, in seconds.
    :param done: what has been done for it, for those who work on it again and again.
    """

    change: StateChange
    heard_at: float
    done: set[Any] = field(default_factory=set)


class Work(Protocol):
    """What the queue's thread does."""

    def __call__(self, pending: Pending, age: float) -> float | None:
        """Work on a change, and return in how many seconds to go on; None: that was all.

        :param age: seconds since Airflow announced it; infinite: there is no later.
        """

    def rest(self) -> None:
        """Let go of what it has for the next changes, for none has come for a while."""


class ChangeQueue:
    """Changes that wait for a thread, which the first of them starts in each process.

    :meth:`put` never waits: neither for the thread nor for what it works on.

    :param work: done in the thread; what it raises is logged, and ends the work on that change.
    :param limit: how many changes may wait; further ones are dropped, counted and logged.
    """

    def __init__(self, work: Work, *, limit: int = LIMIT, clock: Callable[[], float] = time.monotonic) -> None:
        self._work = work
        self._limit = limit
        self._clock = clock
        self._numbers = itertools.count()
        self.forget()

    def forget(self) -> None:
        """Begin as in a new process: a fork has no thread, and what waits there waits in its parent too."""
        self._condition = Condition()
        #: By the time of the next look.
        self._waiting: list[tuple[float, int, Pending]] = []
        self._thread: Thread | None = None
        self._at_work = False
        self._finishing = False
        self.dropped = 0

    def put(self, change: StateChange) -> None:
        """Let a change wait for the thread, or drop it where too many wait."""
        now = self._clock()
        with self._condition:
            full = len(self._waiting) >= self._limit
            if full:
                self.dropped += 1
            else:
                heapq.heappush(self._waiting, (now, next(self._numbers), Pending(change, now)))
                self._condition.notify()
                if self._thread is None:
                    self._thread = start_thread(self._run, "delayed-listener", inherit=False)
        if full:
            metrics.count_listener_dropped()
        if full and self.dropped % LOGGED_DROPS == 1:
            log.error(
                "%s: %s changes wait for the store already, so the listener drops this one, %s in all by now; what was"
                " dropped is armed and taken back by callbacks alone",
                change,
                f"{self._limit:,}",
                f"{self.dropped:,}",
            )

    def __len__(self) -> int:
        """Return how many changes wait or are worked on."""
        return len(self._waiting) + self._at_work

    def finish(self, seconds: float) -> bool:
        """Let the thread work on all changes now and for the last time; return whether it could, in so many seconds."""
        with self._condition:
            self._finishing = True
            self._condition.notify_all()
            return self._condition.wait_for(lambda: not len(self), seconds)

    def _run(self) -> None:
        metrics.begin_outside_tasks()
        while True:
            pending = self._next()
            try:
                again = self._work(pending, math.inf if self._finishing else self._clock() - pending.heard_at)
            except Exception as error:
                # without the error's own text, which may show what nobody should read
                frames = "".join(traceback.format_tb(error.__traceback__))
                log.error("%s: the listener could not work on it: %s\n%s", pending.change, explained(error), frames)
                again = None
            with self._condition:
                self._at_work = False
                if again is not None:
                    heapq.heappush(self._waiting, (self._clock() + again, next(self._numbers), pending))
                self._condition.notify_all()

    def _next(self) -> Pending:
        """Wait for the next change whose time has come."""
        idle = rests = False
        while True:
            if idle and not rests:
                self._work.rest()
                rests = True
            with self._condition:
                left = self._waiting[0][0] - self._clock() if self._waiting else math.inf
                if self._waiting and (left <= 0 or self._finishing):
                    self._at_work = True
                    return heapq.heappop(self._waiting)[2]
                longest = left if rests else min(left, IDLE)
                idle = not self._condition.wait(None if longest == math.inf else longest)


class StateListener:
    """Airflow's listener: it puts each final state of a run, or of a task that Airflow's server sets, into the queue.

    A task instance on a worker is no concern of it: its callbacks come from the same process.

    :param queue: takes the changes.
    """

    def __init__(self, queue: ChangeQueue) -> None:
        self.queue = queue

    @hookimpl
    def on_dag_run_success(self, dag_run: DagRun, msg: str) -> None:
        """Queue a run that ends well; not yet committed."""
        self._put_run(dag_run, "success")

    @hookimpl
    def on_dag_run_failed(self, dag_run: DagRun, msg: str) -> None:
        """Queue a run that fails; not yet committed."""
        self._put_run(dag_run, "failed")

    @hookimpl
    def on_task_instance_success(self, previous_state: object, task_instance: TaskInstance) -> None:
        """Queue a task instance that a person marks as success."""
        self._put_task(task_instance, "success")

    @hookimpl
    def on_task_instance_failed(self, previous_state: object, task_instance: TaskInstance, error: object) -> None:
        """Queue a task instance that a person marks as failed, or whose worker the scheduler lost."""
        self._put_task(task_instance, "failed")

    def _put_run(self, run: DagRun, state: str) -> None:
        dag: Any = getattr(run, "dag", None)
        if dag is None or NOTIFIERS in (dag.default_args or ()):
            self.queue.put(StateChange(dag_id=run.dag_id, run_id=run.run_id, state=state, dag=dag))

    def _put_task(self, task: TaskInstance, state: str) -> None:
        if type(task).__module__.startswith("airflow.models."):
            self.queue.put(
                StateChange(
                    dag_id=task.dag_id,
                    run_id=task.run_id,
                    task_id=task.task_id,
                    map_index=task.map_index,
                    state=state,
                )
            )


class NotifierWork:
    """The work of the queue's thread: it calls the notifiers of a changed run or task instance.

    As long as the committed state is not the one that Airflow announced, it waits for the transaction; after a minute
    what is committed counts.

    :param clock: in seconds; for the pauses of stores that do not answer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: By store: until when it is not asked again.
        self._silent_until: dict[str, float] = {}
        #: By store: what keeps its connection open from one change to the next.
        self._open: dict[str, ExitStack] = {}
        #: What a fork has from its parent, and never closes.
        self._inherited: object = None
        #: The DAG of the change before, and when it was read: a person may mark many tasks of a run at once.
        self._read: tuple[float, str, Any] = (-math.inf, "", None)

    def forget(self) -> None:
        """Begin as in a new process, which has not opened the connections of its parent."""
        self._inherited, self._open = self._open, {}
        self._silent_until = {}

    def rest(self) -> None:
        """Close the connections of all stores."""
        for store in list(self._open):
            self._close(store)

    def _close(self, store: str) -> None:
        if (opened := self._open.pop(store, None)) is not None:
            opened.close()

    def __call__(self, pending: Pending, age: float) -> float | None:
        """Work on a change, see :class:`Work`."""
        from sqlalchemy.exc import SQLAlchemyError

        change = pending.change
        try:
            dag = self._dag_of(change)
            text = None if dag is None else (dag.default_args or {}).get(NOTIFIERS)
            context = None if text is None else _committed(change, dag)
        except SQLAlchemyError as error:
            # Airflow's own database is away, or busy
            if age >= TRIED:
                raise
            log.warning("%s: %s; the listener tries again in %g s", change, explained(error), SILENCE)
            return SILENCE
        if text is None or context is None:
            # no notifiers, or the run has been deleted
            return None
        state = context["ti" if change.task_id is not None else "dag_run"].state
        if state != change.state and age < VISIBLE:
            return LOOK
        notifiers = enumerate(kept_notifiers(text, change.task_id, state))
        pauses = [self._notify(pending, number, one, context, age) for number, one in notifiers]
        return min((pause for pause in pauses if pause is not None), default=None)

    def _dag_of(self, change: StateChange) -> Any:
        """Return the serialized DAG of a change; None: there is none."""
        from airflow.models.serialized_dag import SerializedDagModel

        if change.dag is not None:
            return change.dag
        read_at, dag_id, dag = self._read
        if dag_id != change.dag_id or self._clock() - read_at > FRESH:
            dag = SerializedDagModel.get_dag(change.dag_id)
            self._read = self._clock(), change.dag_id, dag
        return dag

    def _notify(
        self, pending: Pending, number: int, notifier: StoreNotifier, context: Mapping[str, Any], age: float
    ) -> float | None:
        """Call a notifier, unless that has been done; return in how many seconds to try again."""
        store = str(notifier.store_conn_id)
        if number in pending.done:
            return None
        if notifier.stores and age < PATIENCE:
            return PATIENCE - age
        pause = self._silent_until.get(store, 0.0) - self._clock()
        if pause > 0 and age < TRIED:
            return pause
        pending.done.add(number)
        try:
            if store not in self._open:
                self._open[store] = ExitStack()
                self._open[store].enter_context(calls_of(store).kept_open())
            notifier.notify(context)  # type: ignore[arg-type]
        except Exception as error:
            self._close(store)
            # the others say that something is wrong, which no time mends
            silent = isinstance(error, TransportUnavailable) or type(error) is DelayedError
            if silent:
                self._silent_until[store] = self._clock() + SILENCE
            if silent and age < TRIED:
                log.warning("%s: %s; the listener tries again in %g s", pending.change, explained(error), SILENCE)
                pending.done.discard(number)
                return SILENCE
            metrics.count_listener_dropped()
            log.error("%s: %s; the listener gives this change up", pending.change, explained(error))
        else:
            self._silent_until.pop(store, None)
        return None


def _committed(change: StateChange, dag: Any) -> dict[str, Any] | None:
    """Return what Airflow's database has of a run or task instance, as the context of a callback; None: nothing."""
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import select

    run = select(*(getattr(DagRun, name) for name in _RUN)).where(
        DagRun.dag_id == change.dag_id, DagRun.run_id == change.run_id
    )
    task = select(*(getattr(TaskInstance, name) for name in _TASK)).where(
        TaskInstance.dag_id == change.dag_id,
        TaskInstance.run_id == change.run_id,
        TaskInstance.task_id == change.task_id,
        TaskInstance.map_index == change.map_index,
    )
    with create_session(scoped=False) as session:
        of_run = session.execute(run).mappings().first()
        of_task = None if change.task_id is None else session.execute(task).mappings().first()
    if of_run is None or (change.task_id is not None and of_task is None):
        return None
    dag_run = SimpleNamespace(**of_run)
    context = {"dag": dag, "run_id": dag_run.run_id, "dag_run": dag_run, "params": _params(dag, dag_run.conf)}
    if of_task is None:
        return context
    # in the callback of a task the run goes on, and the failure is named by the task's try
    dag_run.end_date = None
    return {**context, "ti": SimpleNamespace(**of_task)}


#: The fields that a callback has of a run, and of a task instance.
_RUN: tuple[str, ...] = ("dag_id", "run_id", "run_type", "run_after", "state", "start_date", "end_date", "conf")
_RUN += ("logical_date", "data_interval_start", "data_interval_end")
_TASK = ("dag_id", "run_id", "task_id", "map_index", "try_number", "id", "state", "start_date", "end_date")


def _params(dag: Any, run_conf: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the params of a run, as Airflow makes them for a callback."""
    params = dict(dag.params.dump())
    if conf.getboolean("core", "dag_run_conf_overrides_params", fallback=True):
        params.update(run_conf or {})
    return params


def _listener() -> StateListener:
    """Return a listener for this process and its forks, whose thread gets some seconds at the process's end."""
    work = NotifierWork()
    queue = ChangeQueue(work)
    for forget in (queue.forget, work.forget):
        os.register_at_fork(after_in_child=forget)
    atexit.register(queue.finish, AT_EXIT)
    return StateListener(queue)


#: The listeners of the plugin.
listeners: list[StateListener] = [_listener()]


def stop_listening() -> None:
    """Hear no changes in this process.

    Airflow refuses tasks with end_from_trigger=True in a process with a listener.
    """
    from airflow.listeners.listener import get_listener_manager

    while listeners:
        one = listeners.pop()
        # to make a manager, Airflow loads all plugins
        info = getattr(get_listener_manager, "cache_info", None)
        if (info is None or info().currsize) and get_listener_manager().pm.is_registered(one):
            get_listener_manager().pm.unregister(one)
