"""StoreDispatchOperator: a task that dispatches the messages of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from airflow.sdk import BaseOperator

from airflow_delayed import config, lineage, metrics
from airflow_delayed.compat import AirflowException, AirflowFailException, conf
from airflow_delayed.delivery import delivery_for
from airflow_delayed.links import DeliveriesLink
from airflow_delayed.message import plain_span
from airflow_delayed.operators.task_state import first_dispatch
from airflow_delayed.store.dispatch.dispatcher import Dispatcher
from airflow_delayed.store.dispatch.report import DispatchFailed, DispatchReport
from airflow_delayed.store.policy import BREAKER_TIME, LEASE, DispatchPolicy, check_connections

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delayed.hooks.store import DelayedStoreHook


#: Seconds that the pass on the worker may take, before the triggerer goes on.
HERE = 30.0
#: How many reasons for failed messages that pass hands to the triggerer, for the error at the end.
REASONS = 10


class StoreDispatchOperator(lineage.Traced, BaseOperator):
    """Dispatches the messages of a store that are due within ``lookahead``, each with its remaining delay.

    A message is dispatched at least once, into a queue table of the store's database exactly once, and then removed.
    Any number of these tasks may run side by side, on any machines: none sends a message that another one has claimed.
    The claims of a killed task end after ``claim_timeout``.

    A message that a transport refuses is tried again after 1 s, then 2 s, 4 s and so on up to 5 min (less up to half of
    that, by chance): in this run if it lasts so long, otherwise in a later one. A run in which messages only wait for
    their next try succeeds, with a warning in its log: the lookahead leaves time for it. After the last try the message
    goes to ``error_destination``, and the run still succeeds. Without an error destination it goes to the table of
    failed messages, and the run fails when all other messages are dispatched. Airflow does not retry that run, since
    there is nothing to repeat: see DelayedStoreHook.retry. A lost connection is tried again until its breaker trips;
    then the run fails, all messages stay as they were, and a retry helps.

    Returns counts (``dispatched``, ``retried``, ``failed``, ``expired``, ``error_destination``, ``forgotten``,
    ``left_to_others``, ``by_connection``) and the first and last due time. At its end, and every half minute while it
    stays, it reports the numbers of messages in the store as gauges, see DelayedStoreHook.gauges.

    The store:

    :param store_conn_id: the store, a SQL connection.
    :param table: the store's table.
    :param schema: the schema of the table and of queue tables.

    Where to:

    :param deliver_conn_ids: the connections that it may deliver through; messages of other connections stay in the
        store. The store's own name stands for queue tables in its database. By default
        ``[delayed] deliver_conn_ids``.
    :param allowed_destinations: names, or patterns with ``*``, ``?`` and ``[...]``. A message to another destination
        fails with the reason, as above, and is not sent. Without this limit, everybody who may insert into the store's
        table can reach each queue that the connections may write to. None: all destinations.
    :param error_destination: receives messages after their last try, through the connection that could not deliver them
        and without delay, with the headers ``NServiceBus.FailedQ`` (the message's destination),
        ``NServiceBus.ExceptionInfo.Message`` and ``NServiceBus.TimeOfFailure``.

    When, and how fast:

    :param lookahead: how long before its due time a message is dispatched, or less if its transport cannot delay it for
        so long; a queue table gets it when it is due. "auto": with ``until`` at its due time where it arrives sooner so
        (RabbitMQ), as beside a dispatcher that stays; else ``[delayed] lookahead`` ahead, 15 minutes. A time ahead must
        be longer than the time between two runs and a worker's start: one shorter than the DAG's schedule is an error.
    :param until: None makes one pass; "empty" goes on until the store has no message for these connections; a
        timedelta goes on for that long, with "auto" at least until the DAG's next run.
    :param deferrable: with ``until``, make one pass on the worker, of half a minute at most, and do the rest in the
        triggerer, which needs no worker meanwhile. The triggerer sleeps exactly until the next message, and
        looks every second for a new one that is due earlier. One pass alone has nothing to wait for, and is made on the
        worker. By default ``[operators] default_deferrable``.
    :param batch_size: messages that are claimed at a time.
    :param max_rate: messages a second at most, of all connections of this task together; None: no limit.

    Safety:

    :param number_of_retries: of messages that a transport refuses; 7 retries are 8 attempts. (NServiceBus's default of
        0 is 2 attempts, 7 are 9.) A message gets no retry where that cannot help: its destination does not exist, it is
        beyond a limit of the transport, or its row cannot be read. A lost connection is no attempt.
    :param remember: how long the ids of dispatched and cancelled messages are remembered; by default
        ``[delayed] remember``, 14 days.
    :param claim_timeout: how long the claims of a dispatcher that has stopped responding stay in force.
    :param give_up_after: how long the store, or a delivering connection, may fail until the task fails; before that,
        messages due on the other connections are dispatched. It also fails if failures cannot be recorded, or sent to
        the error destination, more often than once a second, over 30 s.

    Result:

    :raises ValueError: a parameter has a value that is not possible.
    """

    template_fields: Sequence[str] = (
        *("store_conn_id", "deliver_conn_ids", "error_destination", "allowed_destinations", "table", "schema"),
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {"deliver_conn_ids": "json", "allowed_destinations": "json"}
    operator_extra_links = (DeliveriesLink(),)

    def __init__(
        self,
        *,
        store_conn_id: str,
        deliver_conn_ids: Sequence[str] | str | None = None,
        lookahead: timedelta | Literal["auto"] = "auto",
        batch_size: int = 500,
        until: timedelta | Literal["empty"] | None = None,
        number_of_retries: int = 7,
        error_destination: str | None = None,
        give_up_after: timedelta = BREAKER_TIME,
        max_rate: float | None = None,
        remember: timedelta | None = None,
        claim_timeout: timedelta = LEASE,
        allowed_destinations: Sequence[str] | str | None = None,
        table: str = "delayed_messages",
        schema: str | None = None,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if isinstance(until, timedelta):
            until = plain_span("until", until)
        if until not in (None, "empty") and not (isinstance(until, timedelta) and until > timedelta(0)):
            raise ValueError(f"until={until!r} must be None, for one pass, or 'empty', or a timedelta above 0")
        self.store_conn_id = store_conn_id
        self.deliver_conn_ids = list(config.deliver_conn_ids()) if deliver_conn_ids is None else deliver_conn_ids
        self.lookahead = lookahead
        self.auto_lookahead = config.lookahead() if lookahead == "auto" else lookahead
        self.batch_size = batch_size
        self.until = until
        self.number_of_retries = number_of_retries
        self.error_destination = error_destination
        self.give_up_after = give_up_after
        self.max_rate = max_rate
        self.remember = config.remember() if remember is None else remember
        self.claim_timeout = claim_timeout
        self.allowed_destinations = allowed_destinations
        self.table = table
        self.schema = schema
        self.deferrable = deferrable
        self._dispatching = False
        DispatchPolicy.of(vars(self))
        if deliver_conn_ids is None and not self.deliver_conn_ids:
            raise ValueError(
                "deliver_conn_ids= is not given, and option deliver_conn_ids in section [delayed] of Airflow's"
                " configuration is empty; name the connections that messages may be delivered through"
            )
        if isinstance(self.deliver_conn_ids, str | list | tuple):
            check_connections(self._deliver_conn_ids())

    def execute(self, context: Context) -> dict[str, Any]:
        """Dispatch messages, and return the counts.

        :raises AirflowFailException: messages are in the table of failed messages; or the lookahead, or ``until``, is
            shorter than the time until the DAG's next run.
        :raises DispatchFailed: a connection could not be used; its messages are still in the store.
        :raises BreakerTripped: the store's database could not be used.
        :raises AirflowException: the task was ended from outside, see :meth:`on_kill`.
        """
        from airflow_delayed.hooks.store import DelayedStoreHook

        policy = DispatchPolicy.of(vars(self))
        with (
            closing(DelayedStoreHook(self.store_conn_id, table=self.table, schema=self.schema)) as store,
            closing(
                store.dispatcher(self._deliver_conn_ids(), delivery_for, stays=self.until is not None, **asdict(policy))
            ) as dispatcher,
        ):
            self._check_lookahead(context, store, dispatcher)
            self._name(store)
            began, earlier = first_dispatch(context, store.now())
            if earlier:
                dispatcher.take_up(began)
            self._dispatching = True
            try:
                if not self.deferrable or self.until is None:
                    with metrics.Gauges(store):
                        return dispatcher.run(self.until).to_json()
                # due messages leave sooner than through the triggerer, and a broken connection is an error at once
                end = store.now() + self.until if isinstance(self.until, timedelta) else None
                dispatcher.once(HERE)
                if dispatcher.unavailable or (end is None and dispatcher.next_due() is None):
                    return dispatcher.finish().to_json()
            except DispatchFailed as error:
                raise _failure(error) from error
            finally:
                self._dispatching = False
                metrics.tell_gauges(store)
            until = "empty" if end is None else end.isoformat()
            summary, failures = dispatcher.report.to_json(), dict(islice(dispatcher.failures.items(), REASONS))
        self._defer(until, summary, failures, began.isoformat())
        raise AssertionError("unreachable: defer has raised")

    def on_kill(self) -> None:
        """Send what is claimed, release the rest, and fail: on SIGTERM, as Kubernetes sends it before it ends a pod.

        Airflow calls this in the task's thread, in the middle of whatever it does there, so that an error ends that.

        :raises AirflowException: the task was dispatching. Its retry, or the DAG's next run, goes on.
        """
        if self._dispatching:
            # not once more while it ends
            self._dispatching = False
            raise AirflowException(
                "The task was ended from outside (SIGTERM). Batches that were being sent are finished; the other"
                " messages stay in the store, and the next try or run dispatches them"
            )

    def resume(
        self,
        context: Context,
        until: str | None = None,
        summary: dict[str, Any] | None = None,
        failures: dict[str, str] | None = None,
        began: str | None = None,
        event: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the counts of the trigger, or fail as it did; go on if it had not ended."""
        if event is None:
            # a task that was taken up again by mistake comes here early (apache/airflow#65248)
            self.log.warning("woken without an event: going on; what was counted since is not in the summary")
            if until is None:
                return self.execute(context)
            self._defer(until, summary or {}, failures or {}, began)
        assert event is not None
        if event["status"] == "given up":
            raise AirflowFailException(event["error"])
        if event["status"] != "done":
            raise AirflowException(event["error"])
        done: dict[str, Any] = event["summary"]
        self.log.info("store %r: %s", self.store_conn_id, DispatchReport.from_json(done))
        if lineage.wanted():
            from airflow_delayed.hooks.store import DelayedStoreHook

            with closing(DelayedStoreHook(self.store_conn_id, table=self.table, schema=self.schema)) as store:
                self._name(store)
        return done

    def _defer(self, until: str, summary: dict[str, Any], failures: dict[str, str], began: str | None) -> None:
        from airflow_delayed.triggers.store_dispatch import StoreDispatchTrigger

        carried: dict[str, Any] = {"until": until, "summary": summary, "failures": failures, "began": began}
        self.defer(
            trigger=StoreDispatchTrigger(
                store_conn_id=self.store_conn_id,
                deliver_conn_ids=self._deliver_conn_ids(),
                table=self.table,
                schema=self.schema,
                policy=DispatchPolicy.of(vars(self)).state(),
                **carried,
            ),
            method_name="resume",
            kwargs=carried,
        )

    def _name(self, store: DelayedStoreHook) -> None:
        self._trace(lambda: ([store.own_dataset()], []))

    def _deliver_conn_ids(self) -> list[str]:
        return [self.deliver_conn_ids] if isinstance(self.deliver_conn_ids, str) else list(self.deliver_conn_ids)

    def _check_lookahead(self, context: Context, store: DelayedStoreHook, dispatcher: Dispatcher) -> None:
        """Check that each message that falls due between this run and the next can be dispatched in time."""
        run = scheduled(context)
        if run is None or self.until == "empty":
            return
        timetable, due = run
        lookahead = DispatchPolicy.of(vars(self)).farthest
        gap = until_next_run(timetable, due)
        if gap is None:
            self.log.warning(
                "the time until the next run is not known from %s; lookahead=%s must be longer",
                type(timetable).__name__,
                lookahead,
            )
            return
        stay = self.until if isinstance(self.until, timedelta) else timedelta(0)
        for conn_id, window in dispatcher.windows().items():
            if window + stay >= gap or conn_id in dispatcher.beside:
                continue
            advice = "run it more often, or let it stay with until="
            if conn_id == self.store_conn_id:
                self.log.warning("queue tables get messages up to %s late, the time between two runs; %s", gap, advice)
            elif self.lookahead == "auto" and self.until is not None and not window:
                raise AirflowFailException(
                    f"until={self.until} is shorter than the time until the next run, {gap}: what falls due in between"
                    f" for connection {conn_id!r} would be late; let it stay longer, or give a fixed lookahead="
                )
            elif window < lookahead:
                raise AirflowFailException(
                    f"connection {conn_id!r} can be given messages no earlier than {window} before they are due, and"
                    f" the next run comes after {gap}: what falls due in between would be late; {advice}"
                )
            else:
                raise AirflowFailException(
                    f"lookahead={lookahead} is shorter than the time until the next run, {gap}: what falls due in"
                    f" between would be late; give it a longer one, {advice}"
                )


def _failure(error: DispatchFailed) -> Exception:
    """Return the exception for the task; Airflow shall not retry it if all connections worked and messages failed."""
    return error if error.unavailable else AirflowFailException(str(error))


def until_next_run(timetable: Any, after: datetime) -> timedelta | None:
    """Return the time from a run to the next one of its timetable; None if it is unknown.

    It is known for a fixed timedelta, for a cron expression, and for "@continuous": there the next run begins at the
    end of this one.

    :param after: when the run was due, aware.
    """
    if type(timetable).__name__ == "ContinuousTimetable":
        return timedelta(0)
    delta = getattr(timetable, "delta", None)
    if delta is not None:
        # the length of a relativedelta, such as a month, differs from run to run
        return after + delta - after  # type: ignore[no-any-return]
    expression, zone = getattr(timetable, "expression", None), getattr(timetable, "timezone", None)
    if expression is None or zone is None:
        return None
    from airflow.timetables.base import DataInterval, TimeRestriction
    from airflow.timetables.trigger import CronTriggerTimetable
    from pendulum import instance

    following = CronTriggerTimetable(expression, timezone=zone).next_dagrun_info(
        last_automated_data_interval=DataInterval.exact(instance(after)),
        restriction=TimeRestriction(earliest=None, latest=None, catchup=True),
    )
    return None if following is None else timedelta(seconds=following.run_after.timestamp() - after.timestamp())


def scheduled(context: Mapping[str, Any]) -> tuple[Any, datetime] | None:
    """Return the timetable of a task's run and the time at which that run was due.

    None if no timetable made the run: a user or another DAG started it.
    """
    dag, run = context.get("dag"), context.get("dag_run")
    if dag is None or run is None or getattr(run.run_type, "value", run.run_type) != "scheduled":
        return None
    return dag.timetable, run.run_after
