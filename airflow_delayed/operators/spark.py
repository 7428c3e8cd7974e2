"""DelayedSparkSendOperator: Spark's executors send what a table, a query or files hold.

Its parameters are frozen and checked as :class:`SparkArguments`, which make the command line of Spark's job.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from airflow.sdk import XComArg

from airflow_delayed import config, lineage, metrics
from airflow_delayed.addresses import is_secret, parse, secrets_of, shown, without_secrets
from airflow_delayed.compat import AirflowFailException
from airflow_delayed.delivery import Clock, Delivery, TopologyReport
from airflow_delayed.errors import DelayedError, InputError, MissingExtra, SourceError, TransportUnavailable
from airflow_delayed.fields import FIELD_NAMES
from airflow_delayed.links import StoredMessagesLink
from airflow_delayed.message import delay_of, utcnow
from airflow_delayed.operators import reporting
from airflow_delayed.operators.send_arguments import CommonArguments, HidesArguments, hold_over_of, masked, origin_of
from airflow_delayed.operators.spark_connections import spark_connections_file, spark_headers_file
from airflow_delayed.operators.task_state import FirstTry, earlier_success, iteration_of, load_first_try, note_success
from airflow_delayed.route import Route
from airflow_delayed.sources.templated import file_system
from airflow_delayed.spark.options import UNKNOWN
from airflow_delayed.spark.reporting import check_manifest
from airflow_delayed.trace import current_trace

if TYPE_CHECKING:
    from airflow.sdk import Context

#: Parameters that are options of the sending by the same name, as they are.
_SAME = (
    *("destination", *FIELD_NAMES, "timezone", "past_due", "envelope"),
    *("batch_rows", "window", "due_at", "spread", "hold_over", "max_past"),
)

#: A secret in the middle of an option's value, such as a connection string.
_PARAMETER = re.compile(
    r"(?:^|[?&;,\s])(?:password|passwd|pwd|accountkey|sharedaccesskey|secret|token)\s*=", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True, repr=False)
class SparkArguments(CommonArguments):
    """The parameters of DelayedSparkSendOperator, see there."""

    choices: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        **CommonArguments.choices,
        "connections": ("file", "cluster"),
    }

    source: str | None
    table: str | None
    source_format: str
    source_schema: str | None
    source_options: Mapping[str, str] | None
    query: str | None
    batch_rows: int | None
    window: int | None
    connections_per_executor: int | None
    partitions: int | None
    check_first: bool
    connections: str
    manifest: str | None
    attempts: str | None

    def __post_init__(self) -> None:
        sources = [name for name in ("table", "source", "query") if getattr(self, name) is not None]
        if not sources or ("table" in sources and len(sources) > 1):
            names = sources or "none"
            raise ValueError(f"give table=, source=, query=, or source= with a query= over it; given: {names}")
        for name in ("batch_rows", "window", "connections_per_executor", "partitions"):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ValueError(f"{name}={number!r} must be a whole number, 1 or more")
        if secret := self._secret():
            raise ValueError(secret)
        super().__post_init__()

    def application_arguments(
        self, context: Context, began: FirstTry, manifest: str, *, files: Mapping[str, str]
    ) -> list[str]:
        """Return the job's command line.

        :param files: names of files that Spark distributes, by the option that takes them.
        """
        arguments = []
        for name in ("table", "source", "query"):
            if value := getattr(self, name):
                arguments += [f"--{name}", str(value)]
        if self.source:
            arguments += ["--format", self.source_format]
            if self.source_schema:
                arguments += ["--schema", self.source_schema]
            for name, value in (self.source_options or {}).items():
                arguments += ["--read", f"{name}={value}"]
        if self.partitions:
            arguments += ["--partitions", str(self.partitions)]
        if self.check_first:
            arguments.append("--check-first")
        options = self._options(context, began) | {**files, "manifest": _plain_url(manifest)}
        for name, value in options.items():
            if value:
                arguments += ["--set", f"{name}={value}"]
        return arguments

    def _options(self, context: Context, began: FirstTry) -> dict[str, str]:
        anchor = began.anchor if iteration_of(context) is None else None
        if self.delay_from is not None:
            anchor = self.anchor(context)
        origin = origin_of(context)
        return {name: _text(getattr(self, name)) for name in _SAME} | {
            "delay": "" if self.delay is None else _text(delay_of(self.delay)),
            "deliver": self.conn_id,
            "store": self.store_conn_id if self.store_conn_id and self.store_conn_id != self.conn_id else "",
            "until_due": "true" if self.until_due and self.store_conn_id != self.conn_id else "",
            "id_columns": ",".join(self.id_column_names()),
            "scope": json.dumps(origin.parts),
            "columns": "" if self.columns is None else json.dumps(dict(self.columns)),
            "origin": json.dumps(origin.to_json()),
            "anchor": UNKNOWN if anchor is None else anchor.isoformat(),
            "began": began.began.isoformat(),
            "connections": _text(self.connections_per_executor),
            "attempts": _plain_url(self.attempts) if self.attempts else "",
            "dry_run": "true" if self.only_plan else "",
            **current_trace(),
            "on_conflict": "" if self.on_conflict == "error" else self.on_conflict,
        }

    def _secret(self) -> str | None:
        """Return what to do about an argument with a secret in it, as far as names and addresses show one, or None."""
        shows = "Spark-submit's command line and Airflow's UI would show it."
        configured = (
            "Spark's own configuration has a place for it (spark-defaults.conf: spark.hadoop.* for files, a catalog of"
            " spark.sql.catalog.* for a database, and then table=)"
        )
        options = self.source_options if isinstance(self.source_options, Mapping) else {}
        for name, value in options.items():
            if is_secret(str(name)) or secrets_of(str(value)) or _PARAMETER.search(str(value)):
                return f"source_options[{name!r}] is, or has, a password, token or key. {shows} {configured}"
        for name in ("source", "manifest", "attempts"):
            if secrets_of(str(getattr(self, name) or "")):
                own = "" if name == "source" else "; for this task an Airflow connection, as in s3://conn_id@bucket/key"
                return f"{name}= is an address with a login or a signature. {shows} {configured}{own}"
        return None


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, timedelta):
        # "2.5", and never "1e-06"
        return f"{value.total_seconds():f}"
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _plain_url(url: str) -> str:
    """Return a URL without the Airflow connection that it may name, of which Spark knows nothing."""
    parts = parse(url)
    if parts is None or not parts.user:
        return url
    return url.replace(f"{parts.user}@", "", 1)


try:
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
except ModuleNotFoundError:
    raise MissingExtra("DelayedSparkSendOperator", "apache-airflow-providers-apache-spark", "spark") from None

if TYPE_CHECKING:
    from airflow.sdk import Context


class DelayedSparkSendOperator(lineage.Traced, HidesArguments, SparkSubmitOperator):
    """Send rows from Spark's executors, each to arrive at its own due time, through the transport of ``conn_id``.

    It is for more rows than one worker can send; fewer rows are sent sooner by DelayedSendOperator. The rows come from
    ``table``, from ``source`` (files), or from ``query``; a query may read ``source`` as the view ``source``. Columns
    and parameters have the names and meanings of DelayedSendOperator's. It submits a ready application, so
    no Spark code has to be written; all further parameters are SparkSubmitOperator's.

    The machines of driver and executors need this package in the same release, the transport's client and pyarrow, and
    no Airflow. How they learn of the connections: see ``connections``.

    A wrong row fails its Spark task when other rows may have been sent; ``check_first`` reads all rows before that. A
    retry sends the same messages with the same ids, and so do Spark's own retries and speculation: a store keeps each
    once, a broker may deliver one again.

    What to send:

    :param table: a table of Spark's catalog.
    :param source: a path or URL as Spark has it.
    :param source_format: the format of the files, any that Spark reads.
    :param source_schema: the files' columns as Spark's DDL, ``"value string, due_at timestamp"``, for formats that have
        no types of their own.
    :param source_options: options of the format. No password, token or key: spark-submit's command line and the UI show
        them, so that they are refused, as are logins in addresses; Spark's own configuration has them.
    :param query: Spark SQL.
    :param headers: as DelayedSendOperator's. spark-submit distributes them as a file (see ``connections``), so that
        neither its command line nor Spark shows their values.
    :param id_columns: as DelayedSendOperator's; so are ``tag`` and ``columns``.

    When:

    :param delay: as DelayedSendOperator's; so are ``delay_from``, ``due_at``, ``timezone``, ``expires_at`` and
        ``spread``.

    Where to:

    :param conn_id: as DelayedSendOperator's.
    :param destination: the name of the queue. With it, whether it can receive is looked up before Spark starts. It and
        ``store_conn_id``, ``hold_over``, ``until_due`` and ``envelope`` are DelayedSendOperator's.

    How Spark sends:

    :param spark_conn_id: where Spark runs; what SparkSubmitOperator calls ``conn_id``.
    :param name: the name of the application.
    :param connections: how executors learn of the connections: "file" has spark-submit distribute a file of them, which
        only this user may read here; "cluster" leaves it to the cluster: each executor has environment variables
        ``DELAYED_CONN_<NAME>``, or ``DELAYED_CONNECTIONS_FILE``.
    :param batch_rows: messages given to the transport at a time.
    :param window: RabbitMQ's unconfirmed messages of one connection.
    :param connections_per_executor: how many tasks of an executor may send at a time; by default all that it runs.
    :param partitions: send from so many partitions.
    :param manifest: a URL, or path, that Spark's driver writes its counts to and this task reads; by default a file of
        this machine, which is right where the driver runs here (client mode).
    :param attempts: a folder, as URL or path, that all executors and the driver share; with it the log counts what
        attempts had sent that failed.

    Safety:

    :param on_conflict: as DelayedSendOperator's; so are ``past_due`` and ``max_past``.
    :param check_first: read and check all rows before the first is sent; the rows are read twice.
    :param on_empty: "warn", "fail" or "skip" the task when nothing was sent.
    :param dry_run: check all, send nothing.

    Result:

    :return: a summary (rows, sent, stored, replaced, not_replaced, duplicates, skipped, first_due, last_due), no body.
    :raises AirflowFailException: the input is wrong, as far as it is known before the job; nothing was sent.
    """

    template_fields: Sequence[str] = (
        *(name for name in SparkSubmitOperator.template_fields if name not in ("application", "application_args")),
        *("conn_id", "store_conn_id", "table", "source", "source_schema", "source_options", "query", "destination"),
        *("delay", "delay_from", "due_at", "headers", "id_columns", *FIELD_NAMES, "timezone", "on_conflict"),
        *("envelope", "manifest", "attempts"),
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        "headers": "json",
        "id_columns": "json",
        "source_options": "json",
        "query": "sql",
    }
    #: The present; a test sets another.
    clock: Clock = staticmethod(utcnow)
    operator_extra_links = (StoredMessagesLink(),)
    ui_color = "#e8f1fb"

    def __init__(
        self,
        *,
        conn_id: str,
        spark_conn_id: str = "spark_default",
        table: str | None = None,
        source: str | None = None,
        source_format: str = "parquet",
        source_schema: str | None = None,
        source_options: Mapping[str, str] | None = None,
        query: str | None = None,
        destination: str | None = None,
        delay: timedelta | float | str | None = None,
        delay_from: datetime | str | None = None,
        due_at: datetime | str | None = None,
        headers: Mapping[str, str] | None = None,
        id_columns: Sequence[str] | str | None = None,
        tag: str | None = None,
        expires_at: datetime | str | None = None,
        spread: timedelta | str | None = None,
        store_conn_id: str | None = None,
        hold_over: timedelta | str | None = None,
        until_due: bool = False,
        on_conflict: str = "error",
        timezone: str | None = None,
        past_due: Literal["fail", "send", "skip"] = "fail",
        max_past: timedelta | str | None = None,
        on_empty: Literal["warn", "fail", "skip"] = "warn",
        columns: Mapping[str, str] | None = None,
        envelope: str | None = None,
        batch_rows: int | None = None,
        window: int | None = None,
        connections_per_executor: int | None = None,
        partitions: int | None = None,
        check_first: bool = False,
        connections: Literal["file", "cluster"] = "file",
        manifest: str | None = None,
        attempts: str | None = None,
        dry_run: bool = False,
        name: str = "airflow-delayed",
        **kwargs: Any,
    ) -> None:
        super().__init__(conn_id=spark_conn_id, name=name, **kwargs)
        self.conn_id = conn_id
        self.table = table
        self.source = source
        self.source_format = source_format
        self.source_schema = source_schema
        self.source_options = source_options
        self.query = query
        self.destination = destination
        self.delay = delay
        self.delay_from = delay_from
        self.due_at = due_at
        self.headers = masked(headers)
        self.id_columns = id_columns
        self.tag = tag
        self.expires_at = expires_at
        self.spread = spread
        self.store_conn_id = store_conn_id
        self.hold_over = hold_over_of(hold_over, until_due=until_due)
        self.until_due = until_due
        self.on_conflict = on_conflict
        self.timezone = timezone
        self.past_due = past_due
        self.max_past = config.max_past() if max_past is None else max_past
        self.on_empty = on_empty
        self.columns = columns
        self.envelope = envelope
        self.batch_rows = batch_rows
        self.window = window
        self.connections_per_executor = connections_per_executor
        self.partitions = partitions
        self.check_first = check_first
        self.connections = connections
        self.manifest = manifest
        self.attempts = attempts
        # BaseOperator has a method of the parameter's name
        self.only_plan = dry_run
        #: The connection of the store that messages were left in.
        self.stored_in: str | None = None
        SparkArguments.of(vars(self))
        # behind the mask it would not make its task come first
        XComArg.apply_upstream_relationship(self, headers)

    def execute(self, context: Context) -> dict[str, Any]:  # type: ignore[override]
        """Submit the job, and return its counts."""
        counts = None if self.only_plan else earlier_success(context)
        try:
            if counts is None:
                counts = self._run(context)
            else:
                self.log.warning(
                    "an earlier try has sent all of this, and its worker was lost before Airflow knew: Spark's job does"
                    " not run again"
                )
            shown_counts = ("summary", "partitions", "repeated", "other_attempts")
            self.log.info("%s", json.dumps({name: counts[name] for name in shown_counts}))
            summary: dict[str, Any] = counts["summary"]
            if not any(summary[name] for name in ("sent", "stored", "replaced", "duplicates")):
                reporting.report_empty(self.log, self.on_empty, summary["rows"])
        except InputError as error:
            raise AirflowFailException(str(error)) from error
        to = {name: counts[name] for name in ("destinations", "other_destinations") if name in counts}
        reporting.add_to_events(context, self.outlets, {"conn_id": self.conn_id, **summary, **to})
        return summary

    def _run(self, context: Context) -> Mapping[str, Any]:
        with ExitStack() as stack:
            arguments = SparkArguments.rendered(vars(self))
            manifest = arguments.manifest
            if manifest is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="delayed-manifest-"))
                manifest = f"{folder}/manifest.json"
            route = arguments.route(context, stack, self.log)
            store = route.store if self._verify(arguments, route) else None
            began = load_first_try(
                context, self.clock(), retries=self.retries or 0, keep=not self.only_plan, store=store
            )
            if store is not None:
                # the job may take hours
                store.close()
            if began.cleared_state and arguments.past_due == "skip":
                raise InputError(
                    "this task was cleared, and Airflow has forgotten when it first began: past_due='skip' could"
                    " skip rows that have fallen due since and were never sent. Nothing was sent. Pass"
                    " past_due='send' or 'fail', or run the DAG again"
                )
            if route.store is not None and not self.only_plan:
                self.stored_in = arguments.conn_id if route.holds_all else arguments.store_conn_id
            self._submit(context, arguments, stack, manifest, began)
            counts = self._read(manifest)
            if not self.only_plan:
                note_success(context, counts)
                self._account(arguments, route, counts)
            return counts

    def _verify(self, arguments: SparkArguments, route: Route) -> bool:
        """Check that messages can be received, before minutes of work; executors may reach more than this machine."""
        seen = True
        reports: dict[str, TopologyReport] = {}
        destinations = [arguments.destination] if arguments.destination else []
        transports: list[tuple[str, Delivery, list[str]]] = [(arguments.conn_id, route.delivery, destinations)]
        if arguments.store_conn_id and route.store is not None:
            transports.append((arguments.store_conn_id, route.store, []))
        for conn_id, transport, names in transports:
            try:
                reports[conn_id] = transport.verify(names, max_delay=None if route.store is None else route.hold_over)
            except TransportUnavailable as error:
                self.log.warning("from here it cannot be seen whether all is ready: %s", error)
                seen = False
            finally:
                transport.close()
        reporting.require_ready(reports)
        return seen

    def _submit(
        self, context: Context, arguments: SparkArguments, stack: ExitStack, manifest: str, began: FirstTry
    ) -> None:
        from airflow_delayed.spark import job

        files = {}
        if arguments.connections == "file":
            named = [name for name in (arguments.conn_id, arguments.store_conn_id) if name]
            files["connections_file"] = stack.enter_context(spark_connections_file(named))
        if headers := arguments.header_texts():
            files["headers_file"] = stack.enter_context(spark_headers_file(headers))
        # Spark's own list of files
        self.files = ",".join([*([self.files] if self.files else []), *files.values()]) or None
        self.application = job.__file__
        names = {option: Path(path).name for option, path in files.items()}
        self.application_args = arguments.application_arguments(context, began, manifest, files=names)
        try:
            super().execute(context)
        except FileNotFoundError as error:
            # the provider alone brings a Spark that can only talk to another one
            raise DelayedError(
                f"Spark cannot be started on this worker, which has no {error.filename}: pip install"
                " 'apache-airflow-providers-apache-spark[pyspark]', or name the worker's own in the extra spark-binary"
                f" of connection {self._conn_id!r}"
            ) from error

    def _read(self, manifest: str) -> Mapping[str, Any]:
        fs, path = file_system(manifest)
        try:
            with fs.open(path, "rb") as file:
                content = json.loads(file.read())
        except (OSError, ValueError) as error:
            raise DelayedError(
                f"Spark's job has ended, and its counts are not at {shown(manifest)}"
                f" ({without_secrets(str(error), manifest)}); where its driver does not run"
                " on this machine, give manifest= a URL that both can open. What was sent stays sent, and a retry means"
                " the same messages"
            ) from error
        if self.manifest is None:
            Path(path).unlink()
        try:
            return check_manifest(content, shown(manifest))
        except SourceError as error:
            raise DelayedError(str(error)) from None

    def _account(self, arguments: SparkArguments, route: Route, counts: Mapping[str, Any]) -> None:
        summary = counts["summary"]
        metrics.count_sent(arguments.conn_id, self.stored_in, summary["sent"], summary["stored"])
        # the store has what was replaced, too
        stored = bool(summary["stored"] + summary["replaced"])
        self._trace(lambda: (arguments.inputs(), route.outputs(counts.get("destinations", {}), stored=stored)))
        if route.store is not None:
            stored, hold_over = summary["stored"], arguments.hold_over or config.hold_over()
            reporting.warn_without_dispatcher(self.log, route.store, arguments.conn_id, stored, hold_over)
