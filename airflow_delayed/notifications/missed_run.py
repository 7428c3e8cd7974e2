"""MissedRunNotifier: a message that is due when no run of a DAG has ended well in time, whatever kept it from that.

No callback is heard where a task's process is killed, and nothing at all where the scheduler does not begin the run. So
the message is not stored by what went wrong, but before: each good end of a run stores the message about the next run,
and only then cancels those about itself and earlier runs. Between the two a crash leaves both messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow_delayed.compat import core_timetable
from airflow_delayed.errors import InputError, explained
from airflow_delayed.identity import MAX_NAME, MISSED_RUN, key_id
from airflow_delayed.message import delay_of, due_after, utc, utcnow
from airflow_delayed.notifications.callback_run import SCHEDULED, CallbackRun, moment_of, tag_of
from airflow_delayed.notifications.notifiers import MessageNotifier, RenderedFields, base_url, is_template
from airflow_delayed.notifications.store_calls import calls_of

if TYPE_CHECKING:
    from airflow.sdk import DAG, Context

    from airflow_delayed.hooks.store import DelayedStoreHook
    from airflow_delayed.store.api import RunAttempt, RunFailure

log = logging.getLogger(__name__)

#: The states of a message that is delivered no more.
GIVEN_UP = ("failed", "expired")
#: Airflow's type of the runs of a backfill; their ids begin with it.
_BACKFILL = "backfill"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRun:
    """A run that has to end well in time.

    :param run_id: as Airflow will name it; with ``every=`` there is no name yet, and it says after which run it comes.
    :param run_after: the run's; of a run that has no time yet, that of the run before it.
    :param expected_at: when it can begin.
    :param started_at: no attempt of it begins earlier; None: nothing is known of it.
    """

    dag_id: str
    run_id: str
    run_after: datetime
    expected_at: datetime
    started_at: datetime | None

    def attempt(self, key: str | None) -> RunAttempt:
        """Return the run as the store compares it with others: a later one of the DAG replaces it."""
        from airflow_delayed.store.api import RunAttempt

        tag = tag_of(self.dag_id, key, begins=MISSED_RUN)
        return RunAttempt(
            name=f"{tag} {self.run_id}",
            run_id=self.run_id,
            tag=tag,
            started_at=self.started_at,
            run_after=self.run_after,
        )

    def missed(self, now: datetime, armed: str = "") -> CallbackRun:
        """Return the run as what has failed if it does not end well; its time begins when it can, and not before now.

        :param armed: makes another message of a run that had one.
        """
        return CallbackRun(
            dag_id=self.dag_id,
            run_id=self.run_id,
            run_after=self.run_after,
            started_at=self.started_at,
            failure=f"missed{armed}",
            failed_at=max(self.expected_at, now),
            reason="missed",
        )


class MissedRunNotifier(MessageNotifier):
    """Stores a message that is due when no run of a DAG has ended well in time, whatever kept it from that.

    As ``on_success_callback`` of a DAG. Each good end of a run stores the message about the next run, due ``within``
    after that run's scheduled time, and then cancels the messages about itself and about earlier runs. So one message
    waits at any time, and is delivered if nothing more is heard of the DAG: because a task was killed, the scheduler is
    down or the DAG is paused. It is the dispatcher that has to live: run ``airflow delayed dispatcher`` as a service.

    The message about the first run is stored by ``airflow delayed arm DAG_ID``. :meth:`arm_own` as
    ``on_execute_callback`` of a DAG's first task stores the one about its own run, if none waits.

    Only runs that the schedule makes count. The good end of a backfill or of a run that a person starts does nothing.

    :param conn_id: as :class:`DelayedNotifier` has it; so are ``store_conn_id``, ``destination``, ``value`` and
        ``headers``. The default body is that of a failure whose ``reason`` is ``missed``.
    :param within: a timedelta or seconds, in which a run must have ended well: from its scheduled time (``run_after``)
        or, where that is over when the message is stored, from then on.
    :param every: for a DAG whose schedule has no times, such as one of assets: a timedelta or seconds, in which a run
        must follow the last run that ended well. Then all runs count but those of backfills.
    :param key: with ``every``, narrows the runs that follow each other, such as ``"{{ params.customer }}"``.
    :raises ValueError: an argument is missing or wrong.
    """

    kept_arguments: Sequence[str] = ("store_conn_id", "key", "conn_id", "destination", "within", "every")

    def __init__(
        self,
        *,
        conn_id: str,
        destination: str,
        within: timedelta | float,
        every: timedelta | float | None = None,
        store_conn_id: str | None = None,
        value: Any = None,
        headers: Mapping[str, str] | None = None,
        key: str | None = None,
        context: Context | None = None,
    ) -> None:
        self.within = _span("within", within)
        self.every = None if every is None else _span("every", every)
        super().__init__(
            conn_id=conn_id,
            destination=destination,
            delay=self.within,
            store_conn_id=store_conn_id,
            value=value,
            headers=headers,
            key=key,
            context=context,
        )

    def check_dag(self, dag: DAG, task_id: str | None, state: str) -> None:
        """Check that this is the DAG's ``on_success_callback``, and that it can be known when a run is missed.

        :raises AirflowClusterPolicyViolation: it is not, or it cannot.
        """
        from airflow.exceptions import AirflowClusterPolicyViolation

        if state != "success" or task_id is not None:
            owner = f"DAG {dag.dag_id!r}" + ("" if task_id is None else f", task {task_id!r},")
            raise AirflowClusterPolicyViolation(
                f"MissedRunNotifier of {owner} is no on_success_callback of a DAG: make it one, for it stores the"
                " message about the next run when a whole run ends well"
            )
        if self.every is None and not _has_times(dag):
            raise AirflowClusterPolicyViolation(
                f"MissedRunNotifier of DAG {dag.dag_id!r} needs every=, such as every=timedelta(days=1): the DAG's"
                " schedule does not say when its next run is due"
            )

    def arm_own(self, context: Context) -> None:
        """Store the message about the run of a task that begins, unless there was one; for ``on_execute_callback``.

        Where the good end of the run before was not heard, nobody has stored it yet.

        :raises DelayedError: the store refuses, or does not answer within 10 seconds; Airflow logs it.
        """
        if (own := self._own(CallbackRun.of(context))) is not None:
            self._arm_by_call(own, self.rendered({**context, "missed_run": own}))

    def arm_first(self, dag: DAG, run_after: datetime | None, key: str | None = None) -> tuple[str, str, datetime]:
        """Store the message about the next run, unless one waits; for the command ``airflow delayed arm``.

        Unlike a callback, it does so again after the message was cancelled or delivered.

        :param run_after: of the next run; with ``every=`` it does not count. None: there is no next run.
        :param key: in place of the notifier's own.
        :return: "stored", "waits" or "succeeded"; the id of the message, and when it is due.
        :raises InputError: there is no run that could be missed.
        :raises DelayedError: the store refuses, or does not answer within 10 seconds.
        """
        now = utcnow()
        if self.every is not None:
            first = self._after(dag.dag_id, f"the command at {now:%Y-%m-%dT%H:%M:%S}Z", now)
        elif run_after is None:
            raise InputError(f"DAG {dag.dag_id!r} has no further run that could be missed")
        else:
            first = _scheduled(dag.dag_id, run_after)
        dag_run = SimpleNamespace(dag_id=dag.dag_id, run_id=first.run_id, run_after=first.run_after)
        context = {"dag": dag, "params": dag.params.dump(), "run_id": first.run_id, "dag_run": dag_run}
        rendered = self.rendered({**context, "reason": "missed", "missed_run": first})
        if key is not None:
            rendered = RenderedFields({**rendered.values, "key": key}, rendered.problems)
        return self._arm_by_call(first, rendered, again=True)

    def _work(
        self, run: CallbackRun, context: Mapping[str, Any]
    ) -> tuple[str, Callable[[DelayedStoreHook], Any], Sequence[str]]:
        own = self._own(run)
        following = None if own is None else self._following(run, own, context)
        return super()._work(run, {**context, "missed_run": following, "own_run": own})

    def work(
        self, run: CallbackRun, attempt: RunAttempt, rendered: RenderedFields, context: Mapping[str, Any]
    ) -> Callable[[DelayedStoreHook], None]:
        """Return what stores the message about the next run, and then cancels those about this one and earlier ones."""
        own, following = context["own_run"], context["missed_run"]

        def go_on(store: DelayedStoreHook) -> None:
            if own is None:
                log.info("%s: it does not count, for the schedule has not made it", run)
                return
            if following is None:
                log.info("%s: the DAG has no further run that could be missed", run)
            else:
                self._arm(store, following, rendered)
            self._take_back(store, run, own.attempt(rendered["key"]), own.expected_at)

        return go_on

    def _own(self, run: CallbackRun) -> ExpectedRun | None:
        """Return a run that counts as it was expected; None: it does not count."""
        if self.every is not None and run.run_type != _BACKFILL and not run.run_id.startswith(f"{_BACKFILL}__"):
            began = run.run_after or run.started_at or utcnow()
            return ExpectedRun(
                dag_id=run.dag_id, run_id=run.run_id, run_after=began, expected_at=began, started_at=run.started_at
            )
        if self.every is None and run.run_type == SCHEDULED and run.run_after is not None:
            return _scheduled(run.dag_id, run.run_after)
        return None

    def _following(self, run: CallbackRun, own: ExpectedRun, context: Mapping[str, Any]) -> ExpectedRun | None:
        """Return the run that has to follow a run that counts; None: there is none."""
        if self.every is not None:
            return self._after(run.dag_id, run.run_id, own.run_after)
        following = _next_time(context["dag"], own.run_after, context.get("dag_run"))
        return None if following is None else _scheduled(run.dag_id, following)

    def _after(self, dag_id: str, run_id: str, run_after: datetime) -> ExpectedRun:
        assert self.every is not None
        return ExpectedRun(
            dag_id=dag_id,
            run_id=f"after {run_id}"[:MAX_NAME],
            run_after=run_after,
            expected_at=run_after + self.every,
            started_at=None,
        )

    def _arm_by_call(
        self, expected: ExpectedRun, rendered: RenderedFields, *, again: bool = False
    ) -> tuple[str, str, datetime]:
        def arm(store: DelayedStoreHook) -> tuple[str, str, datetime]:
            return self._arm(store, expected, rendered, again=again)

        return calls_of(rendered["store_conn_id"]).call(arm, self.conn_ids(rendered))

    def _arm(
        self, store: DelayedStoreHook, expected: ExpectedRun, rendered: RenderedFields, *, again: bool = False
    ) -> tuple[str, str, datetime]:
        """Store the message about a run; return what became of it, its id, and when it is due.

        :param again: also where the message about that run waits no longer.
        """
        now, attempt = store.now(), expected.attempt(rendered["key"])
        if again:
            beginning = self._beginning(attempt)
            for one in store.list(tag=attempt.tag):
                if one.message_id.startswith(beginning) and one.state not in GIVEN_UP:
                    return "waits", one.message_id, one.due_at
        for armed in ("", f" again at {now.isoformat()}"):
            missed = expected.missed(now, armed)
            outcome = self._arming(missed, attempt, rendered)(store).value
            message = self._escalation(missed, attempt, rendered).message
            if not again or outcome != "known":
                break
        return outcome, message.message_id, message.due_at

    def _take_back(self, store: DelayedStoreHook, run: CallbackRun, success: RunAttempt, since: datetime) -> None:
        taken = store.take_back(success, actor=str(run))
        if changed := taken.outcomes.changed:
            log.info("%s: %s messages about missed runs taken back", run, f"{changed:,}")
        late = [message_id for message_id, outcome in taken.outcomes.items() if outcome == "in flight"]
        late += store.dispatched_since(self._beginning(success), since)
        for message_id in dict.fromkeys(late):
            log.warning("%s: it has ended well too late: a dispatcher has handed over %s", run, message_id)

    def _beginning(self, attempt: RunAttempt) -> str:
        # each run has a message of its own: that about the next one is stored while that about this one waits
        return f"{super()._beginning(attempt)}{key_id(('run',), (attempt.name,))[:8]}-"

    def _described(
        self, run: CallbackRun, attempt: RunAttempt, rendered: RenderedFields, problem: str | None
    ) -> RunFailure:
        # a run that has not begun has no page
        url = base_url().rstrip("/")
        runs = f"{url}/dags/{quote(run.dag_id, safe='')}/runs" if url else None
        failure = super()._described(run, attempt, rendered, problem)
        return replace(failure, failed_at=due_after(run.failed_at, self.within), run_url=runs)


def _span(name: str, value: timedelta | float) -> timedelta:
    if is_template(value):
        raise ValueError(f"{name}={value!r}: it is no template, for it is needed where there is no run yet")
    if not (span := delay_of(value, name)):
        raise ValueError(f"{name}={value!r}: a run needs some time")
    return span


def _has_times(dag: DAG) -> bool:
    """Return whether a DAG's schedule says when its next run is due."""
    try:
        timetable = core_timetable(dag)
        return bool(timetable.periodic and timetable.can_be_scheduled)
    except Exception as error:
        # Airflow cannot read every timetable in its serialized form
        log.warning("DAG %s: its timetable cannot be read: %s", dag.dag_id, explained(error))
        return False


def _scheduled(dag_id: str, run_after: datetime) -> ExpectedRun:
    moment = utc("run_after", run_after)
    return ExpectedRun(
        dag_id=dag_id,
        # as Airflow's own timetables name it
        run_id=f"{SCHEDULED}__{moment.isoformat()}",
        run_after=moment,
        expected_at=moment,
        started_at=moment,
    )


def _next_time(dag: Any, run_after: datetime, run: Any) -> datetime | None:
    """Return the ``run_after`` of the run that the schedule has after another one; None: there is none.

    Runs that Airflow leaves out with ``catchup=False`` count as well: a later run's good end ends them.

    :param run: the other run; its data interval counts where Airflow has passed one.
    """
    import pendulum
    from airflow.timetables.base import DagRunInfo, DataInterval, TimeRestriction

    timetable = core_timetable(dag)
    at = pendulum.instance(run_after)
    ends = [moment_of(run, name) for name in ("data_interval_start", "data_interval_end")]
    if None in ends:
        interval = timetable.infer_manual_data_interval(run_after=at)
    else:
        interval = DataInterval(*(pendulum.instance(one) for one in ends if one is not None))
    latest = None if dag.end_date is None else pendulum.instance(dag.end_date)
    restriction = TimeRestriction(earliest=None, latest=latest, catchup=True)
    if hasattr(timetable, "next_dagrun_info_v2"):
        last = DagRunInfo(run_after=at, data_interval=interval, partition_date=None, partition_key=None)
        found = timetable.next_dagrun_info_v2(last_dagrun_info=last, restriction=restriction)
    else:
        # Airflow 3.1
        found = timetable.next_dagrun_info(last_automated_data_interval=interval, restriction=restriction)
    return None if found is None else utc("run_after", found.run_after)
