"""The parameters of DelayedSparkSendOperator, frozen and checked, and the command line of Spark's job."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, ClassVar

from airflow_delayed.addresses import is_secret, parse, secrets_of
from airflow_delayed.message import delay_of
from airflow_delayed.operators.send_arguments import CommonArguments, origin_of
from airflow_delayed.operators.task_state import FirstTry, iteration_of
from airflow_delayed.spark.options import UNKNOWN
from airflow_delayed.trace import current_trace

if TYPE_CHECKING:
    from airflow.sdk import Context

#: Parameters that are options of the sending by the same name, as they are.
_SAME = (
    "destination",
    "tag",
    "timezone",
    "past_due",
    "unknown_columns",
    "topology",
    "routing",
    "envelope",
    "batch_rows",
    "window",
    "due_at",
    "expires_at",
    "spread",
    "hold_over",
    "max_past",
)


#: A secret in the middle of an option's value, such as a connection string.
_PARAMETER = re.compile(
    r"(?:^|[?&;,\s])(?:password|passwd|pwd|accountkey|sharedaccesskey|secret|token)\s*=", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True, repr=False)
class SparkArguments(CommonArguments):
    """The parameters of DelayedSparkSendOperator, see there.

    :raises ValueError: an argument is missing or wrong, or contradicts another.
    """

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

        :param began: when the task's first try began.
        :param files: names of files that Spark distributes, by the option that takes them.
        :raises InvalidMessage: ``delay`` is none, or ``delay_from`` is no time.
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
        """Return the options of the sending; an empty one is left out."""
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
            "origin": json.dumps({name: value for name, value in asdict(origin).items() if value is not None}),
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
