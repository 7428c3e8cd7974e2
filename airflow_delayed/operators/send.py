"""DelayedSendOperator: rows or messages of a task become messages that arrive at their due time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from airflow.sdk import BaseOperator, XComArg
from airflow.sdk.configuration import conf
from airflow.sdk.definitions.mappedoperator import MappedOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from airflow_delayed import config, lineage, metrics
from airflow_delayed.delivery import Clock
from airflow_delayed.errors import DestinationMissing, InputError, SourceError, TopologyError
from airflow_delayed.intake.rejects import Rejects
from airflow_delayed.intake.rows import Problem, RowReader
from airflow_delayed.intake.sources import ListSource, Source, open_source
from airflow_delayed.links import StoredMessagesLink
from airflow_delayed.message import utcnow
from airflow_delayed.operators import told
from airflow_delayed.operators.arguments import check_arguments
from airflow_delayed.operators.events import describe
from airflow_delayed.operators.first_try import FirstTry, ended, first_try, waits
from airflow_delayed.operators.routes import route_of
from airflow_delayed.operators.rules import rules_of
from airflow_delayed.operators.storage import file_system, shown
from airflow_delayed.pauses import pause
from airflow_delayed.route import Route
from airflow_delayed.sending import Sending
from airflow_delayed.store.conflicts import OnConflict
from airflow_delayed.survey import Survey

if TYPE_CHECKING:
    from airflow.sdk import Context

#: A wait that is no longer is slept on the worker: to be deferred and resumed takes about as long.
BRIEF = timedelta(seconds=10)


class DelayedSendOperator(lineage.Traced, BaseOperator):
    """Send messages, each to arrive at its own due time, through the transport of ``conn_id``.

    What to send is one of ``messages``, ``source`` and ``value``. Everything is checked before the first message is
    sent; a source is read twice for that. A retry sends the same messages with the same ids.

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
    :param due_at: an aware datetime, or ISO 8601 text; with ``timezone`` also a naive one.
    :param headers: text by text, joined with the row's own.
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
        or was cancelled, which is counted as refused. What is due within ``hold_over`` is looked up there too, and
        left to the store if that knows it: a nightly job that runs anew does not send what the store has, or has
        handed over. (What went to the transport at once is not noted in the store; a second run sends it again, with
        the same id.)
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
        All is checked before the wait and again after it, when the rows are read anew. To mark the task failed while
        it waits withdraws all. A worker takes some seconds to start and a lost triggerer half a minute to be replaced,
        a retry its own delay; the transport's delay makes up for a lead that is longer. Without it all is sent at
        once, and nothing ever waits.
    :param deferrable: wait for ``lead`` in the triggerer, and not on the worker. By default
        ``[operators] default_deferrable``.
    :param on_clear: whether a task that is cleared after it ended means the "same_ids", so that what arrives twice can
        be recognised and a store sends nothing twice, with relative delays counted as before; or "new_ids", another
        send, whose relative delays count from then. Only ids that are made from content can be new.
    :param sleep: how to wait on the worker, for tests.
    :param require_success: refuse a folder without ``_SUCCESS``.
    :param source_format: "parquet" or "json"; by default by the files' endings.
    :param dry_run: check all, send nothing, and log what would go where and when.
    :param clock: the present, for tests.
    :return: a summary (sent, held, replaced, refused, duplicates, set_aside, skipped, first_due, last_due), never a
        body.
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
        due_at: datetime | str | None = None,
        headers: Mapping[str, str] | None = None,
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
        self.due_at = due_at
        self.headers = headers
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
        check_arguments(self)
        for hidden in (messages, value, body):
            # what is no template field would otherwise not make its task come first
            XComArg.apply_upstream_relationship(self, hidden)

    def execute(self, context: Context) -> dict[str, Any]:
        """Check, then send; see the class."""
        anew = self.on_clear == "new_ids"
        began = first_try(context, self.clock(), anew=anew, keep=not self.only_plan)
        try:
            with ExitStack() as closing:
                summary = self._execute(context, began, closing)
        except InputError as error:
            if not self.only_plan:
                ended(context, anew=anew)
            raise AirflowFailException(str(error)) from error
        if not self.only_plan:
            ended(context, anew=anew)
        return summary

    def resume(self, context: Context, event: object = None) -> dict[str, Any]:
        """Go on after the wait: look at the clock and at the rows again, and wait anew if it was woken early."""
        return self.execute(context)

    def on_kill(self) -> None:
        """Tell what can be recalled, and what cannot."""
        if self._sending is not None:
            self.log.warning(
                "killed when at least %s messages were sent, which cannot be recalled, and %s were in the store, where"
                " they can be cancelled",
                f"{self._sending.sent.sent:,}",
                f"{self._sending.held.sent:,}",
            )

    def _survey(self, sending: Sending, route: Route) -> tuple[Survey, int]:
        """Check everything, and return what was found and how many rows were set aside."""
        if self.rejects is not None and not self.only_plan:
            with Rejects(*self._rejects_file()) as rejects:
                found = sending.survey(set_aside=rejects.add)
            set_aside = rejects.count
            if set_aside:
                self.log.warning("%s rows cannot be sent and are in %s", f"{set_aside:,}", shown(self.rejects))
        else:
            aside: list[Problem] = []
            found = sending.survey(set_aside=None if self.rejects is None else aside.append)
            set_aside = len(aside)
        told.checked(self.log, self.conn_id, sending.source.name, found)
        self._check_empty(found)
        self._verify(found, route)
        return found, set_aside

    def _execute(self, context: Context, began: FirstTry, closing: ExitStack) -> dict[str, Any]:
        route = route_of(self, context, closing)
        if route.store is not None and not self.only_plan:
            self.held_in = self.conn_id if route.holds_all else self.store_conn_id
        wanted, rules = rules_of(self, context, began.anchor)

        def read(clock: Clock) -> Sending:
            return Sending(
                self._open(context),
                wanted,
                lambda: RowReader(rules),
                route,
                began=began.began,
                past_due=self.past_due,
                max_past=self.max_past,
                clock=clock,
                log=self.log,
            )

        clock = self.clock
        if self.lead is not None:
            clock = self._wait(context, self._capped(self.lead, route), route, read)
        sending = read(clock)
        found, set_aside = self._survey(sending, route)
        self._sending = None if self.only_plan else sending
        try:
            sending.deliver(found, dry_run=self.only_plan)
        finally:
            what = "dry run, so nothing was sent; there would be" if self.only_plan else "confirmed"
            told.done(self.log, what, sending)
            if not self.only_plan:
                self._name(sending, route)
                metrics.count_sent(self.conn_id, self.held_in, sending.sent.sent, sending.held.sent)
        if route.store is not None and not self.only_plan:
            told.unvisited(self.log, route.store, self.conn_id, sending.held.sent, self.hold_over)
        if self.only_plan:
            told.plan(self.log, sending, found.sample, clock())
        summary = told.summary(sending, found, set_aside, dry_run=self.only_plan)
        describe(context, self.outlets, sending, {"conn_id": self.conn_id, **summary})
        return summary

    def _name(self, sending: Sending, route: Route) -> None:
        """Tell OpenLineage where messages came from and went to: through the store, if that took any."""
        if not lineage.wanted():
            return
        with lineage.never_failing():
            counts = Counter(sending.sent.by_destination) + Counter(sending.held.by_destination)
            outputs: list[lineage.Dataset] = []
            if sending.held.by_destination and isinstance(route.store, lineage.TraceableStore):
                outputs.append(route.store.own_dataset())
            if isinstance(route.delivery, lineage.Traceable):
                outputs += [route.delivery.dataset(name) for name, _ in counts.most_common(lineage.NAMED)]
            self._trace([] if self.source is None else [lineage.file(self.source)], outputs)

    def _capped(self, lead: timedelta, route: Route) -> timedelta:
        horizon = route.delivery.horizon
        if route.store is not None or lead <= horizon:
            return lead
        self.log.info("lead is %s here: more than that %s does not delay by itself", horizon, self.conn_id)
        return horizon

    def _wait(self, context: Context, lead: timedelta, route: Route, read: Callable[[Clock], Sending]) -> Clock:
        """Return, when the first message is due within the lead, what to take for the present."""
        first = read(self.clock).first_due(self.clock() + lead)
        if first is None or (wake := first - lead) <= self.clock():
            if not self.only_plan:
                waits(context, False)
            return self.clock
        if self.only_plan:
            self.log.info("would wait until %s, which is %s before the first is due", wake.isoformat(), lead)
            return lambda: wake
        if wake - self.clock() > BRIEF:
            # what is wrong is better known now than then, and is judged by the moment when it will be sent
            self._survey(read(lambda: wake), route)
            self.log.info(
                "waiting until %s, which is %s before the first is due; nothing is sent until then, and nothing at all"
                " if the task is marked failed meanwhile",
                wake.isoformat(),
                lead,
            )
            route.close()
            waits(context, True)
            if self.deferrable:
                from airflow_delayed.triggers.due_time import DueTimeTrigger

                self.defer(trigger=DueTimeTrigger(first, lead=lead), method_name="resume")
        while (left := (wake - self.clock()).total_seconds()) > 0:
            self.sleep(pause(left))
        # the rows may have changed meanwhile
        return self._wait(context, lead, route, read)

    def _rejects_file(self) -> tuple[Any, str]:
        assert self.rejects is not None
        fs, path = file_system(self.rejects)
        if self.source is not None:
            source = file_system(self.source)[1].rstrip("/")
            if path == source or path.startswith(source + "/"):
                raise InputError(f"rejects={shown(self.rejects)} lies in the source itself; give it a place of its own")
        return fs, path

    def _open(self, context: Context) -> Source:
        if self.source is not None:
            fs, path = file_system(self.source)
            return open_source(
                fs,
                path,
                shown_as=shown(self.source),
                source_format=self.source_format,
                require_success=self.require_success,
                naive_ok=self.timezone is not None,
            )
        if self.messages is not None:
            messages = self._rendered("messages", context)
            if isinstance(messages, str | bytes | Mapping) or not hasattr(messages, "__iter__"):
                raise SourceError(
                    f"messages= must be a list of messages, not {type(messages).__name__}; if another task returns it,"
                    " has that run before? In .partial() an XComArg makes no dependency"
                )
            return ListSource(list(messages))
        name = "value" if self.value is not None else "body"
        return ListSource([{name: self._rendered(name, context)}], "parameters")

    def _rendered(self, name: str, context: Context) -> Any:
        """Render what is no template field, since it would be shown; but never what another task has returned.

        Where it was expanded, its XCom has taken the argument's place already, and a body is no template.
        """
        given = getattr(self, name)
        dag = context.get("dag")
        declared = dag.get_task(self.task_id) if dag is not None else self
        if isinstance(declared, MappedOperator) and name not in declared.partial_kwargs:
            return given
        return self.render_template(given, context)

    def _check_empty(self, found: Survey) -> None:
        if found.direct.sent + found.held.sent:
            return
        text = f"there is nothing to send: {found.rows:,} rows were read"
        if self.on_empty == "fail":
            raise InputError(f"{text}; if that may be, pass on_empty='warn' or 'skip'")
        if self.on_empty == "skip":
            raise AirflowSkipException(text)
        self.log.warning(text)

    def _verify(self, found: Survey, route: Route) -> None:
        if not found.destinations:
            return
        # some of what is held now may be near by the time it is sent
        longest = max(found.longest, route.hold_over) if found.held.sent else found.longest
        report = route.delivery.verify(found.destinations, max_delay=longest)
        if report.missing_destinations:
            raise DestinationMissing(
                self.conn_id,
                report.missing_destinations,
                f"create it, or run TopologyInstallOperator(conn_id={self.conn_id!r}, destinations=[...],"
                " create_destinations=True). Nothing was sent",
            )
        # what only blocks passes, and the messages wait until then
        if report.unready:
            raise TopologyError(self.conn_id, report)
        told.doubts(self.log, route.delivery, report, found)
        if route.store is not None and not route.holds_all:
            report = route.store.verify(())
            if not report.ok:
                raise TopologyError(str(self.store_conn_id), report)
