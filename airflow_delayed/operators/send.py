"""DelayedSendOperator: rows or messages of a task become messages that arrive at their due time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from datetime import datetime, timedelta
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from airflow.sdk import BaseOperator, ObjectStoragePath, XComArg

from airflow_delayed import config, lineage, metrics
from airflow_delayed.addresses import shown
from airflow_delayed.compat import AirflowFailException, AirflowSkipException
from airflow_delayed.delivery import Clock
from airflow_delayed.errors import DestinationMissing, InputError, TopologyError
from airflow_delayed.fields import FIELD_NAMES
from airflow_delayed.identity import scope_of
from airflow_delayed.intake.rows import RowReader
from airflow_delayed.intake.sources import Rejects
from airflow_delayed.intake.spool import Spool
from airflow_delayed.links import StoredMessagesLink
from airflow_delayed.message import utcnow
from airflow_delayed.operators import reporting
from airflow_delayed.operators.send_arguments import HidesArguments, SendArguments, hold_over_of, masked, origin_of
from airflow_delayed.operators.task_state import (
    FirstTry,
    TaskCheckpoints,
    load_first_try,
    note_refusal,
    note_success,
    turn_of,
)
from airflow_delayed.route import Route
from airflow_delayed.sending import Log, PreflightReport, Sending
from airflow_delayed.sources.query import QueryFile
from airflow_delayed.sources.templated import TemplatedSource, path_text
from airflow_delayed.store.policy import OnConflict

if TYPE_CHECKING:
    import jinja2
    from airflow.sdk import Context


class DelayedSendOperator(lineage.Traced, HidesArguments, BaseOperator):
    """Send messages, each to arrive at its own due time, through the transport of ``conn_id``.

    What to send is one of ``messages``, ``source`` and ``value``. Everything is checked before the first message is
    sent; a source is read twice for that. A retry means the same messages with the same ids, and goes on where
    an earlier try was interrupted, if source and arguments are as they were: at most 2500 messages come twice.
    Otherwise, and before Airflow 3.3, it sends all from the top.

    Each row of ``messages`` or of ``source`` has the columns ``value`` (or ``body``), ``destination``, ``due_at`` or
    ``delay_seconds``, ``headers``, ``message_id``, ``tag``, ``expires_at``, ``spread_seconds``, ``timezone``; the
    parameters of these names are for rows without the column or with a null in it. Relative delays count from when the
    task's first try began.

    What to send:

    :param messages: a list of dictionaries or DelayedMessage, or an XComArg (of dictionaries that JSON can hold).
        Literals are rendered, what another task returned is not; neither is shown in the UI.
    :param source: a Parquet file or folder as Spark writes it, or JSON lines, local or any fsspec URL
        (``s3://conn_id@bucket/key``): text, a ``pathlib.Path`` or an ObjectStoragePath. Folders named ``column=value``
        add that column. The files' endings say their format, and a folder must have ``_SUCCESS``. Or an object of
        :mod:`airflow_delayed.sources`: files of another ending or without ``_SUCCESS``, or a query.
    :param columns: the source's names of columns, by ours: ``{"value": "text", "due_at": "remind_at"}``. With it, also
        with ``{}``, columns that mean nothing are ignored; without it they are an error. ``id_columns`` has the
        source's names. An object of :mod:`airflow_delayed.sources` may have it instead.
    :param value: one message's body (text, bytes, or a list or dictionary for JSON). Treated as
        ``messages`` is.
    :param headers: a dictionary of text to text, joined with the row's own. The UI shows their names; all other
        arguments but ``messages`` and ``value`` it shows as they are.
    :param message_id: the id of the message with the body ``value``.
    :param id_columns: columns whose values name a message, whatever its run: the id is a hash of them. Without, and
        without a column ``message_id``, it is a hash of the run, the map index and all that the message says.
    :param tag: a text by which messages in a store are found, cancelled and rescheduled.

    When:

    :param delay: how long after its start the message is due: a timedelta, seconds, or an ISO 8601 duration of weeks,
        days, hours, minutes and seconds (``"PT10M"``, ``"P1D"``).
    :param delay_from: the start that relative delays count from: a time, "run" for the DAG run's ``run_after``, or by
        default the start of the task's first try. "run" is right for delays that are longer than a run may lag behind:
        it needs no memory, but a chain of tasks that took three hours makes ``delay=600`` late, and a backfill's is
        long past.
    :param due_at: the time at which the message is due: an aware datetime, or ISO 8601 text; with ``timezone`` also a
        naive one.
    :param timezone: the IANA name of the zone in which times without an offset are read, such as Spark's
        ``timestamp_ntz``; a row may have its own. Spark's ``timestamp`` is an instant, and needs none.
    :param expires_at: the time after which a store no longer dispatches the message.
    :param spread: a message is due within so long after its time, evenly by a hash of its id: a timedelta, or an ISO
        8601 duration. The column ``spread_seconds`` is the row's own. A retry finds the same moments; another span
        under the same id is other content.

    Where to:

    :param conn_id: the connection that delivers: of type ``aws``, ``rabbitmq``, ``amqp`` or ``amqps``, or a SQL
        connection, where the destination is a queue table in that database.
    :param destination: the name of the queue.
    :param store_conn_id: a SQL connection in whose store waits what is due later than ``hold_over`` from now, until a
        StoreDispatchOperator dispatches it.
    :param hold_over: at least the time between two dispatches and a worker's start; what the transport cannot delay by
        itself is stored in any case. By default ``[delayed] hold_over``, 15 minutes.
    :param until_due: let all messages wait in the store until they are due, however soon that is and however far ahead
        a dispatcher looks, so that each can be cancelled until then. They arrive late by the time between two
        dispatches: let a dispatcher stay. A message that the store knows already stays as it is.
    :param envelope: the form of what is sent to SQS, in place of what the connection says: "raw", "nservicebus",
        "nservicebus-unwrapped". Not with a store.

    Safety:

    :param on_conflict: in a store, what becomes of a message whose id it knows with other content: "error" before
        anything is sent; "keep" the old one; "replace" it in one step, unless it is being dispatched, was dispatched
        or was cancelled, counted as not_replaced. This also holds for messages that are due within ``hold_over``. If
        the store knows the id, the message goes to the store. Otherwise it goes to the transport, and the store
        records its id after the confirm. So a retry, or a nightly job that runs again, sends nothing twice. The
        exception is a worker that is killed between confirm and record: up to 2500 messages then come twice, with the
        same ids.
    :param past_due: "fail", "send" or "skip" rows due more than ``max_past`` before the task's first try began.
    :param max_past: see ``past_due``; by default ``[delayed] max_past``, an hour.
    :param rejects: the JSON lines file that receives invalid rows, while the others are sent; corrected, it can be a
        source itself. None: an invalid row fails the task before anything is sent. What only the broker knows to be
        invalid, such as a body beyond its ``max_message_size``, fails it when the others are sent.
    :param on_empty: "warn", "fail" or "skip" the task when there is nothing to send.
    :param on_clear: whether a task that is cleared after it ended means the "same_ids", so that what arrives twice can
        be recognised and a store sends nothing twice, with relative delays counted as before; or "new_ids", another
        send, whose relative delays count from then. Only ids that are made from content can be new. With the same ids a
        task that had failed half-way goes on when it is cleared, as a retry does; a task that had succeeded sends all.
    :param dry_run: check all, send nothing, and log what would go where and when.

    Result:

    :return: a summary (sent, stored, replaced, not_replaced, duplicates, rejected, skipped, first_due, last_due) of all
        tries, how many of them were earlier tries' (earlier_tries), and message_ids if there are up to 100; no body.
    :raises AirflowFailException: the input is wrong, which a retry does not mend; nothing was sent, or all but what
        the broker refused for good.
    :raises SendFailed: some messages were not confirmed.
    :raises Interrupted: the input turned out to be wrong, or changed, when some of it was sent.
    """

    # neither messages nor value: rendered template fields are shown in the UI
    template_fields: Sequence[str] = (
        *(
            "conn_id",
            "store_conn_id",
            "on_conflict",
            "source",
            "destination",
            "delay",
            "delay_from",
            "due_at",
            "headers",
        ),
        *("message_id", "id_columns", *FIELD_NAMES, "timezone", "rejects", "envelope"),
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {"headers": "json", "id_columns": "json"}
    #: The present; a test sets another.
    clock: Clock = staticmethod(utcnow)
    operator_extra_links = (StoredMessagesLink(),)
    ui_color = "#e8f1fb"

    def __init__(
        self,
        *,
        conn_id: str,
        messages: Sequence[Any] | XComArg | None = None,
        source: str | PurePath | ObjectStoragePath | TemplatedSource | None = None,
        value: Any = None,
        destination: str | None = None,
        delay: timedelta | float | str | None = None,
        delay_from: datetime | str | None = None,
        due_at: datetime | str | None = None,
        headers: Mapping[str, str] | None = None,
        message_id: str | None = None,
        id_columns: Sequence[str] | str | None = None,
        tag: str | None = None,
        expires_at: datetime | str | None = None,
        spread: timedelta | str | None = None,
        store_conn_id: str | None = None,
        hold_over: timedelta | str | None = None,
        until_due: bool = False,
        on_conflict: OnConflict | str = "error",
        timezone: str | None = None,
        rejects: str | PurePath | ObjectStoragePath | None = None,
        past_due: Literal["fail", "send", "skip"] = "fail",
        max_past: timedelta | str | None = None,
        on_empty: Literal["warn", "fail", "skip"] = "warn",
        columns: Mapping[str, str] | None = None,
        envelope: str | None = None,
        dry_run: bool = False,
        on_clear: Literal["same_ids", "new_ids"] = "same_ids",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.conn_id = conn_id
        self.messages = messages
        # tasks that are mapped share the object that their DAG has, and rendering changes it
        self.source = source = copy(path_text(source))
        self.value = value
        self.destination = destination
        self.delay = delay
        self.delay_from = delay_from
        self.due_at = due_at
        self.headers = masked(headers)
        self.message_id = message_id
        self.id_columns = id_columns
        self.tag = tag
        self.expires_at = expires_at
        self.spread = spread
        self.store_conn_id = store_conn_id
        self.hold_over = hold_over_of(hold_over, until_due=until_due)
        self.until_due = until_due
        self.on_conflict = on_conflict
        self.timezone = timezone
        self.rejects = path_text(rejects)
        self.past_due = past_due
        self.max_past = config.max_past() if max_past is None else max_past
        self.on_empty = on_empty
        self.columns = columns
        self.envelope = envelope
        # BaseOperator has a method of the parameter's name
        self.only_plan = dry_run
        self.on_clear = on_clear
        #: The connection of the store that messages were left in.
        self.stored_in: str | None = None
        self._sending: Sending | None = None
        #: Whether Airflow has ended the task.
        self.stopped = False
        SendArguments.of(vars(self))
        if isinstance(source, TemplatedSource):
            # Airflow looks for other tasks' results in lists and dictionaries alone
            XComArg.apply_upstream_relationship(self, vars(source))
        for hidden in (messages, value, headers):
            # an argument that is no template field would otherwise not make its task come first
            XComArg.apply_upstream_relationship(self, hidden)

    def render_template(
        self,
        content: Any,
        context: Context,
        jinja_env: jinja2.Environment | None = None,
        seen_oids: set[int] | None = None,
    ) -> Any:
        """Render a template as Airflow does; of a query's file the query in it, wherever a text ends in ``.sql``."""
        if isinstance(content, QueryFile):
            content = f"{{% include {str(content)!r} %}}"
        return super().render_template(content, context, jinja_env, seen_oids)

    def execute(self, context: Context) -> dict[str, Any]:
        """Check, then send; see the class."""
        new_ids = self.on_clear == "new_ids"
        try:
            with ExitStack() as closing:
                arguments = SendArguments.rendered(vars(self))
                opening = _spool_of(context, self.log, retries=self.retries or 0)
                spool = closing.enter_context(opening)
                route = arguments.route(context, closing, self.log)
                if route.store is not None and not self.only_plan:
                    self.stored_in = arguments.conn_id if route.holds_all else arguments.store_conn_id
                unready = reporting.missing_tables(route)
                began = load_first_try(
                    context,
                    self.clock(),
                    retries=self.retries or 0,
                    new_ids=new_ids,
                    keep=not self.only_plan and unready is None,
                    store=route.store if unready is None else None,
                )
                summary = self._execute(context, arguments, began, route, spool, unready)
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
                f"{self._sending.start.stored + self._sending.stored.sent:,}",
            )

    def _execute(
        self,
        context: Context,
        arguments: SendArguments,
        began: FirstTry,
        route: Route,
        spool: Spool,
        unready: TopologyError | None,
    ) -> dict[str, Any]:
        wanted, rules = arguments.rules(context, began.anchor)
        sending = Sending(
            arguments.rows(partial(self.render_hidden, context), spool),
            wanted,
            lambda: RowReader(rules),
            route,
            began=began.began,
            past_due=arguments.past_due,
            max_past=arguments.max_past,
            clock=self.clock,
            log=self.log,
            way=arguments.way,
            stopped=lambda: self.stopped,
            asks=unready is None,
        )
        found, rejects = self._preflight(context, arguments, sending, route)
        if unready is not None:
            # there are no rows, or the tables were made a moment ago
            raise unready
        if began.cleared_state and arguments.past_due == "skip" and found.past_due:
            raise InputError(
                f"{found.past_due:,} rows were due more than {arguments.max_past} before this try, and would be"
                " skipped. But this task was cleared, and Airflow has forgotten when it first began: they may have"
                " fallen due since. Nothing was sent. Pass past_due='send', or run the DAG again"
            )
        self._deliver(context, arguments, sending, found, rejects)
        if self.only_plan:
            reporting.log_plan(self.log, sending, found.sample, self.clock())
        summary = reporting.summary_of(sending, found, dry_run=self.only_plan)
        reporting.describe_events(context, self.outlets, sending, {"conn_id": arguments.conn_id, **summary})
        return summary

    def _preflight(
        self, context: Context, arguments: SendArguments, sending: Sending, route: Route
    ) -> tuple[PreflightReport, Rejects | None]:
        """Check everything, and write rows that cannot be sent to ``rejects``, to which the send may add others."""
        rejects = None
        if arguments.rejects is None:
            found = sending.preflight()
        elif self.only_plan:
            found = sending.preflight(reject=lambda problem: None)
        else:
            with arguments.rejects_file(context) as rejects:
                if rejects.moved_to:
                    self.log.warning("the rows that an earlier run rejected are in %s now", shown(rejects.moved_to))
                found = sending.preflight(reject=rejects.add)
            if rejects.count:
                self.log.warning("%s rows cannot be sent and are in %s", f"{rejects.count:,}", shown(rejects.path))
        reporting.log_preflight(self.log, arguments.conn_id, sending.source.name, found, arguments.past_due)
        messages = found.direct.sent + found.stored.sent
        if not messages:
            reporting.report_empty(self.log, arguments.on_empty, found.rows)
        check_total(messages)
        if found.destinations:
            reporting.verify_route(self.log, arguments.conn_id, arguments.store_conn_id, route, found)
        return found, rejects

    def _deliver(
        self,
        context: Context,
        arguments: SendArguments,
        sending: Sending,
        found: PreflightReport,
        rejects: Rejects | None,
    ) -> None:
        if self.only_plan:
            try:
                sending.deliver(found, dry_run=True)
            finally:
                reporting.log_outcome(self.log, "dry run, so nothing was sent; there would be", sending)
            return
        self._sending = sending
        try:
            checkpoints = TaskCheckpoints(context, self.log, new_ids=arguments.new_ids)
            with rejects or nullcontext():
                sending.deliver(found, checkpoints=checkpoints, reject=None if rejects is None else rejects.add)
        finally:
            if rejects is not None and sending.refused:
                self.log.warning("%s more rows were refused and are in %s", f"{sending.refused:,}", shown(rejects.path))
            reporting.log_outcome(self.log, "confirmed", sending)
            counts, in_store = (sending.sent + sending.stored).by_destination, bool(sending.stored.by_destination)
            self._trace(lambda: (arguments.inputs(), sending.route.outputs(counts, stored=in_store)))
            metrics.count_sent(arguments.conn_id, self.stored_in, sending.sent.sent, sending.stored.sent)
        if sending.route.store is not None:
            store, stored = sending.route.store, sending.start.stored + sending.stored.sent
            hold_over = arguments.hold_over or config.hold_over()
            reporting.warn_without_dispatcher(self.log, store, arguments.conn_id, stored, hold_over)


@contextmanager
def _spool_of(context: Context, log: Log, *, retries: int) -> Iterator[Spool]:
    """Open the spool of a try. It is kept for as long as the same send may go on.

    It is deleted after a success, a refusal and the last try. A task that is cleared has another spool: its rows are
    produced again.

    :param retries: of the task, as its DAG has them now.
    """
    ti, run = context["ti"], context.get("dag_run")
    # a run that was deleted may come again with its name
    began = str(getattr(run, "start_date", None))
    later = ti.try_number > max(1, ti.max_tries - retries + 1)
    spool = Spool(
        config.spool_folder(),
        scope_of(*origin_of(context).parts, turn_of(context), began),
        reuse=later,
        check_count=check_total,
        log=log,
    )
    kept = False
    try:
        yield spool
    except (InputError, AirflowSkipException):
        raise
    except BaseException:
        kept = ti.try_number <= ti.max_tries
        raise
    finally:
        if not kept:
            spool.delete()


def check_total(messages: int) -> None:
    """Check how many messages a run may send."""
    if 0 < (most := config.max_messages_per_run()) < messages:
        raise InputError(
            f"{messages:,} messages are more than the {most:,} that [delayed] max_messages_per_run allows, so nothing"
            " was sent. If they are right, raise the option, or send them in several runs"
        )
