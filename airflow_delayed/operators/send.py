"""DelayedSendOperator: rows or messages of a task become messages that arrive at their due time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from airflow.sdk import BaseOperator, XComArg
from airflow.sdk.definitions.mappedoperator import MappedOperator

from airflow_delayed import config, lineage, metrics
from airflow_delayed.addresses import shown
from airflow_delayed.compat import AirflowFailException, AirflowSkipException, conf
from airflow_delayed.delivery import Clock
from airflow_delayed.errors import DestinationMissing, InputError, Interrupted, TopologyError
from airflow_delayed.intake.rows import Problem, RowReader
from airflow_delayed.links import StoredMessagesLink
from airflow_delayed.message import utcnow
from airflow_delayed.operators import reporting
from airflow_delayed.operators.headers import HidesHeaders, masked
from airflow_delayed.operators.send_arguments import SendArguments
from airflow_delayed.operators.task_state import (
    FirstTry,
    TaskCheckpoints,
    load_first_try,
    note_refusal,
    note_success,
    note_waiting,
)
from airflow_delayed.pauses import pause
from airflow_delayed.route import Route
from airflow_delayed.sending import Sending
from airflow_delayed.store.conflicts import OnConflict
from airflow_delayed.survey import Survey

if TYPE_CHECKING:
    from airflow.sdk import Context

#: Up to this, a wait is slept on the worker: to be deferred and resumed takes about as long.
BRIEF = timedelta(seconds=10)


class DelayedSendOperator(lineage.Traced, HidesHeaders, BaseOperator):
    """Send messages, each to arrive at its own due time, through the transport of ``conn_id``.

    What to send is one of ``messages``, ``source`` and ``value``. Everything is checked before the first message is
    sent; a source is read twice for that. A retry means the same messages with the same ids, and goes on where
    an earlier try was interrupted, if source and arguments are as they were: at most 2500 messages come twice.
    Else, and before Airflow 3.3, it sends all from the top.

    Each row of ``messages`` or of ``source`` has the columns ``value`` (or ``body``), ``destination``, ``due_at`` or
    ``delay_seconds``, ``headers``, ``message_id``, ``tag``, ``expires_at``; the parameters of these names are for rows
    without the column or with a null in it. Relative delays count from when the task's first try began.

    :param conn_id: who delivers: a connection of type ``aws``, ``rabbitmq`` or ``amqp``, or a SQL connection, where the
        destination is a queue table in that database.
    :param messages: a list of dictionaries or DelayedMessage, or an XComArg (of dictionaries that JSON can hold).
        Literals are rendered, what another task returned is not; neither is shown in the UI.
    :param source: a Parquet file or folder as Spark writes it, or JSON lines, local or any fsspec URL
        (``s3://conn_id@bucket/key``). Folders named ``column=value`` add that column.
    :param value: one message's body (text, bytes, or a list or dictionary for JSON). ``body`` is the same. Treated
        as ``messages`` is.
    :param destination: the queue.
    :param delay: a timedelta or seconds.
    :param delay_from: what relative delays count from: a time, "run" for the DAG run's ``run_after``, or by default the
        start of the task's first try. "run" is right for delays that are longer than a run may lag behind: it needs no
        memory, but a chain of tasks that took three hours makes ``delay=600`` late, and a backfill's is long past.
    :param due_at: an aware datetime, or ISO 8601 text; with ``timezone`` also a naive one.
    :param headers: text by text, joined with the row's own. The UI shows their names; all other arguments but
        ``messages``, ``value`` and ``body`` it shows as they are.
    :param show_headers: let the UI show the values of ``headers`` too, among the rendered templates.
    :param message_id: the id of the one message of ``value``.
    :param id_columns: columns whose values name a message, whatever its run: the id is a hash of them. Without, and
        without a column ``message_id``, it is a hash of the run, the map index and all that the message says.
    :param tag: what a user cancels by.
    :param expires_at: not handed over from a store after it.
    :param store_conn_id: a SQL connection in whose store waits what is due later than ``hold_over`` from now, until a
        StoreDispatchOperator hands it over.
    :param hold_over: at least the time between two dispatches and a worker's start; what the transport cannot delay by
        itself is held in any case. By default ``[delayed] hold_over``, 15 minutes.
    :param on_conflict: in a store, what becomes of a message whose id it knows with other content: "error" before
        anything is sent; "keep" the old one; "replace" it in one step, unless it is being handed over, was handed over
        or was cancelled, which is counted as refused. That goes for what is due within ``hold_over`` as well: it is
        looked up in the store, left to it if that knows it, and noted there once the transport has confirmed it. So a
        retry, or a nightly job that runs again, sends nothing twice; but for one chunk of up to 2500 messages, with
        the same ids, if the first was killed between a confirm and its note.
    :param timezone: the IANA name of the zone that times without an offset are in.
    :param invalid_rows: "fail" before anything is sent, or "set_aside" and send the others.
    :param rejects: the JSON lines file that takes rows that are set aside; mended, it can be a source itself.
    :param past_due: "fail", "send" or "skip" rows due more than ``max_past`` before the task's first try began.
    :param max_past: see ``past_due``; by default ``[delayed] max_past``, an hour.
    :param on_empty: "warn", "fail" or "skip" the task when there is nothing to send.
    :param unknown_columns: "fail", or "ignore" columns that mean nothing here.
    :param topology: whose delay levels RabbitMQ uses, in place of what the connection says: "delayed", "nservicebus",
        "nservicebus-v1", "celery", "celery-classic". Not with a store: its dispatcher goes by the connection.
    :param routing: "conventional" or "direct", as the NServiceBus endpoints have it.
    :param envelope: the form of what is sent to SQS, in place of what the connection says: "raw", "nservicebus",
        "nservicebus-unwrapped". Not with a store.
    :param lead: send nothing until so long before the first message is due, and then all. For what shall not be in a
        broker before, or is further off than the transport can delay and has no store; for SQS never more than 870 s.
        All is checked before the wait and again after it, when the rows are read again. To mark the task failed while
        it waits withdraws all. A worker takes some seconds to start and a lost triggerer half a minute to be replaced,
        a retry its own delay; the transport's delay makes up for a lead that is longer. Without it all is sent at
        once, and nothing ever waits.
    :param deferrable: wait for ``lead`` in the triggerer, and not on the worker. By default
        ``[operators] default_deferrable``.
    :param on_clear: whether a task that is cleared after it ended means the "same_ids", so that what arrives twice can
        be recognised and a store sends nothing twice, with relative delays counted as before; or "new_ids", another
        send, whose relative delays count from then. Only ids that are made from content can be new. With the same ids a
        task that had failed half-way goes on when it is cleared, as a retry does; one that had succeeded sends all.
    :param sleep: how to wait on the worker, for tests.
    :param require_success: refuse a folder without ``_SUCCESS``.
    :param source_format: "parquet" or "json"; by default by the files' endings.
    :param dry_run: check all, send nothing, and log what would go where and when.
    :param clock: the present, for tests.
    :return: a summary (sent, held, replaced, refused, duplicates, set_aside, skipped, first_due, last_due) of all
        tries, and how many of sent, held and replaced were earlier tries' (earlier_tries); never a body.
    :raises AirflowFailException: the input is wrong, which a retry does not mend; nothing was sent.
    :raises SendFailed: some messages were not confirmed.
    :raises Interrupted: the input turned out to be wrong, or changed, when some of it was sent.
    """

    # neither messages nor value: rendered template fields are shown in the UI
    template_fields: Sequence[str] = (
        "conn_id",
        "store_conn_id",
        "on_conflict",
        "source",
        "destination",
        "delay",
        "delay_from",
        "due_at",
        "headers",
        "message_id",
        "id_columns",
        "tag",
        "expires_at",
        "timezone",
        "rejects",
        "topology",
        "routing",
        "envelope",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {"headers": "json"}
    operator_extra_links = (StoredMessagesLink(),)
    ui_color = "#e8f1fb"

    def __init__(
        self,
        *,
        conn_id: str,
        messages: Sequence[Any] | XComArg | None = None,
        source: str | None = None,
        value: Any = None,
        body: Any = None,
        destination: str | None = None,
        delay: timedelta | float | str | None = None,
        delay_from: datetime | str | None = None,
        due_at: datetime | str | None = None,
        headers: Mapping[str, str] | None = None,
        show_headers: bool = False,
        message_id: str | None = None,
        id_columns: Sequence[str] | str | None = None,
        tag: str | None = None,
        expires_at: datetime | str | None = None,
        store_conn_id: str | None = None,
        hold_over: timedelta | None = None,
        on_conflict: OnConflict | str = "error",
        timezone: str | None = None,
        invalid_rows: Literal["fail", "set_aside"] = "fail",
        rejects: str | None = None,
        past_due: Literal["fail", "send", "skip"] = "fail",
        max_past: timedelta | None = None,
        on_empty: Literal["warn", "fail", "skip"] = "warn",
        unknown_columns: Literal["fail", "ignore"] = "fail",
        require_success: bool = True,
        source_format: Literal["parquet", "json"] | None = None,
        topology: str | None = None,
        routing: str | None = None,
        envelope: str | None = None,
        dry_run: bool = False,
        lead: timedelta | None = None,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        on_clear: Literal["same_ids", "new_ids"] = "same_ids",
        clock: Clock = utcnow,
        sleep: Callable[[float], object] = time.sleep,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.conn_id = conn_id
        self.messages = messages
        self.source = source
        self.value = value
        self.body = body
        self.destination = destination
        self.delay = delay
        self.delay_from = delay_from
        self.due_at = due_at
        self.headers = masked(headers, show=show_headers)
        self.show_headers = show_headers
        self.message_id = message_id
        self.id_columns = id_columns
        self.tag = tag
        self.expires_at = expires_at
        self.store_conn_id = store_conn_id
        self.hold_over = config.hold_over() if hold_over is None else hold_over
        self.on_conflict = on_conflict
        self.timezone = timezone
        self.invalid_rows = invalid_rows
        self.rejects = rejects
        self.past_due = past_due
        self.max_past = config.max_past() if max_past is None else max_past
        self.on_empty = on_empty
        self.unknown_columns = unknown_columns
        self.require_success = require_success
        self.source_format = source_format
        self.topology = topology
        self.routing = routing
        self.envelope = envelope
        # BaseOperator has a method of the parameter's name
        self.only_plan = dry_run
        self.lead = lead
        self.deferrable = deferrable
        self.on_clear = on_clear
        self.clock = clock
        self.sleep = sleep
        #: The connection of the store that messages were left in.
        self.held_in: str | None = None
        self._sending: Sending | None = None
        #: Whether Airflow has ended the task.
        self.stopped = False
        SendArguments.of(vars(self))
        for hidden in (messages, value, body, headers):
            # what is no template field would otherwise not make its task come first
            XComArg.apply_upstream_relationship(self, hidden)

    def execute(self, context: Context) -> dict[str, Any]:
        """Check, then send; see the class."""
        return self._try(context, None)

    def resume(
        self, context: Context, event: object = None, first_try: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Go on after the wait: look at the clock and at the rows again, and wait on if it was woken early."""
        return self._try(context, None if first_try is None else FirstTry.restored(first_try))

    def _try(self, context: Context, deferred: FirstTry | None) -> dict[str, Any]:
        new_ids = self.on_clear == "new_ids"
        try:
            with ExitStack() as closing:
                arguments = SendArguments.rendered(vars(self))
                route = arguments.route(context, closing, self.log)
                if route.store is not None and not self.only_plan:
                    self.held_in = arguments.conn_id if route.holds_all else arguments.store_conn_id
                began = load_first_try(
                    context,
                    self.clock(),
                    retries=self.retries or 0,
                    new_ids=new_ids,
                    keep=not self.only_plan,
                    deferred=deferred,
                    store=route.store,
                )
                summary = self._execute(context, arguments, began, route)
        except InputError as error:
            if not self.only_plan:
                # a queue that is made again has none of the messages that it had
                note_refusal(context, new_ids=new_ids, from_the_top=isinstance(error, DestinationMissing))
            raise AirflowFailException(str(error)) from error
        except AirflowSkipException:
            if not self.only_plan:
                note_success(context)
            raise
        if not self.only_plan:
            note_success(context)
        return summary

    def on_kill(self) -> None:
        """Send nothing more, and log how many messages can be recalled, and how many cannot."""
        self.stopped = True
        if self._sending is not None:
            self.log.warning(
                "killed when at least %s messages were sent, which cannot be recalled, and %s were in the store, where"
                " they can be cancelled",
                f"{self._sending.start.sent + self._sending.sent.sent:,}",
                f"{self._sending.start.held + self._sending.held.sent:,}",
            )

    def _execute(self, context: Context, arguments: SendArguments, began: FirstTry, route: Route) -> dict[str, Any]:
        wanted, rules = arguments.rules(context, began.anchor)

        def read(clock: Clock) -> Sending:
            return Sending(
                arguments.rows(partial(self._content, context)),
                wanted,
                lambda: RowReader(rules),
                route,
                began=began.began,
                past_due=arguments.past_due,
                max_past=arguments.max_past,
                clock=clock,
                log=self.log,
                way=arguments.way,
                stopped=lambda: self.stopped,
            )

        clock = self.clock
        if arguments.lead is not None:
            clock = self._wait(context, arguments, self._capped(arguments.lead, route), began, route, read)
        sending = read(clock)
        found, set_aside = self._survey(context, arguments, sending, route)
        if began.cleared_state and arguments.past_due == "skip" and found.past_due:
            raise InputError(
                f"{found.past_due:,} rows were due more than {arguments.max_past} before this try, and would be"
                " skipped. But this task was cleared, and Airflow has forgotten when it first began: they may have"
                " fallen due since. Nothing was sent. Pass past_due='send', or run the DAG again"
            )
        self._deliver(context, arguments, sending, found)
        if self.only_plan:
            reporting.log_plan(self.log, sending, found.sample, clock())
        summary = reporting.summary_of(sending, found, set_aside, dry_run=self.only_plan)
        reporting.describe_events(context, self.outlets, sending, {"conn_id": arguments.conn_id, **summary})
        return summary

    def _content(self, context: Context, name: str) -> Any:
        """Render an argument that is no template field, since the UI would show it.

        The result of another task is never rendered: a body is no template. In a mapped task that was expanded from
        an XCom, that result has taken the argument's place already.
        """
        value = getattr(self, name)
        dag = context.get("dag")
        declared = dag.get_task(self.task_id) if dag is not None else self
        if isinstance(declared, MappedOperator) and name not in declared.partial_kwargs and _is_xcom(declared, name):
            return value
        return self.render_template(value, context)

    def _capped(self, lead: timedelta, route: Route) -> timedelta:
        """Return the lead that the transport's own delay can make up for."""
        horizon = route.delivery.horizon
        if route.store is not None or lead <= horizon:
            return lead
        self.log.info("lead is %s here: more than that %s does not delay by itself", horizon, self.conn_id)
        return horizon

    def _wait(
        self,
        context: Context,
        arguments: SendArguments,
        lead: timedelta,
        began: FirstTry,
        route: Route,
        read: Callable[[Clock], Sending],
    ) -> Clock:
        """Wait until the first message is due within the lead, and return the clock to send by.

        :param began: when the first try began.
        :param read: begins to read the rows, by a clock.
        :raises TaskDeferred: it goes on in the triggerer.
        """
        first = read(self.clock).first_due(self.clock() + lead)
        if first is None or (wake := first - lead) <= self.clock():
            if not self.only_plan:
                note_waiting(context, False)
            return self.clock
        if self.only_plan:
            self.log.info("would wait until %s, which is %s before the first is due", wake.isoformat(), lead)
            return lambda: wake
        if wake - self.clock() > BRIEF:
            # errors are known before the wait, and rows are judged by the moment when they will be sent
            self._survey(context, arguments, read(lambda: wake), route)
            self.log.info(
                "waiting until %s, which is %s before the first is due; nothing is sent until then, and nothing at all"
                " if the task is marked failed meanwhile",
                wake.isoformat(),
                lead,
            )
            route.close()
            note_waiting(context, True)
            if self.deferrable:
                from airflow_delayed.triggers.due_time import DueTimeTrigger

                self.defer(
                    trigger=DueTimeTrigger(first, lead=lead), method_name="resume", kwargs={"first_try": began.state()}
                )
        while (left := (wake - self.clock()).total_seconds()) > 0:
            self.sleep(pause(left))
            if self.stopped:
                raise Interrupted(0, 0, "the task was ended while it waited")
        # the rows may have changed meanwhile
        return self._wait(context, arguments, lead, began, route, read)

    def _survey(self, context: Context, arguments: SendArguments, sending: Sending, route: Route) -> tuple[Survey, int]:
        """Check everything, and return the result and how many rows went to ``rejects``.

        :raises InputError: something is wrong with the source, with single rows, or with all of them together.
        :raises DestinationMissing: a destination does not exist.
        :raises TopologyError: a transport, or the store, lacks what it needs.
        :raises AirflowSkipException: there is nothing to send, and that skips the task.
        """
        if arguments.rejects is not None and not self.only_plan:
            with arguments.rejects_file(context) as rejects:
                if rejects.moved_to:
                    self.log.warning("the rows that an earlier run set aside are in %s now", shown(rejects.moved_to))
                found = sending.survey(set_aside=rejects.add)
            set_aside = rejects.count
            if set_aside:
                self.log.warning("%s rows cannot be sent and are in %s", f"{set_aside:,}", shown(rejects.path))
        else:
            problems: list[Problem] = []
            found = sending.survey(set_aside=None if arguments.rejects is None else problems.append)
            set_aside = len(problems)
        reporting.log_preflight(self.log, arguments.conn_id, sending.source.name, found)
        if not found.direct.sent + found.held.sent:
            reporting.report_empty(self.log, arguments.on_empty, found.rows)
        if found.destinations:
            self._verify(arguments, found, route)
        return found, set_aside

    def _verify(self, arguments: SendArguments, found: Survey, route: Route) -> None:
        # messages that go to the store now may be due soon by the time they are sent
        longest = max(found.longest, route.hold_over) if found.held.sent else found.longest
        report = route.delivery.verify(found.destinations, max_delay=longest)
        # a destination that is only blocked passes, and its messages wait until then
        reporting.require_ready(arguments.conn_id, report)
        reporting.log_warnings(self.log, route.delivery, report, found)
        if route.store is not None and not route.holds_all:
            report = route.store.verify(())
            if not report.ok:
                raise TopologyError(str(arguments.store_conn_id), report)

    def _deliver(self, context: Context, arguments: SendArguments, sending: Sending, found: Survey) -> None:
        """Send, and report what was sent even if it failed half-way."""
        if self.only_plan:
            try:
                sending.deliver(found, dry_run=True)
            finally:
                reporting.log_outcome(self.log, "dry run, so nothing was sent; there would be", sending)
            return
        self._sending = sending
        try:
            sending.deliver(found, marks=TaskCheckpoints(context, self.log, new_ids=arguments.new_ids))
        finally:
            reporting.log_outcome(self.log, "confirmed", sending)
            self._name(arguments, sending)
            metrics.count_sent(arguments.conn_id, self.held_in, sending.sent.sent, sending.held.sent)
        if sending.route.store is not None:
            held = sending.start.held + sending.held.sent
            reporting.warn_without_dispatcher(
                self.log, sending.route.store, arguments.conn_id, held, arguments.hold_over
            )

    def _name(self, arguments: SendArguments, sending: Sending) -> None:
        """Name the datasets for OpenLineage: the source, the destinations, and the store, if that took any."""
        if not lineage.wanted():
            return
        with lineage.never_failing():
            counts = Counter(sending.sent.by_destination) + Counter(sending.held.by_destination)
            outputs = sending.route.outputs(counts, stored=bool(sending.held.by_destination))
            self._trace([] if arguments.source is None else [lineage.file(arguments.source)], outputs)


def _is_xcom(mapped: MappedOperator, name: str) -> bool:
    """Return whether ``expand()`` or ``expand_kwargs()`` takes an argument from another task."""
    expanded = mapped.expand_input.value
    if isinstance(expanded, Mapping):
        return isinstance(expanded[name], XComArg)
    if isinstance(expanded, XComArg):
        return True
    return any(isinstance(each, XComArg) or isinstance(each.get(name), XComArg) for each in expanded)
