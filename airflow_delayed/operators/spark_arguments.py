"""DelayedSparkSendOperator's arguments: what can be wrong with them, and how the job is told of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import XComArg

from airflow_delayed.addresses import is_secret, parse, secrets_of
from airflow_delayed.errors import InvalidMessage
from airflow_delayed.operators.headers import headers_of
from airflow_delayed.operators.routes import origin_of
from airflow_delayed.operators.rules import anchor_of
from airflow_delayed.operators.task_state import FirstTry, iteration_of
from airflow_delayed.spark.options import UNKNOWN
from airflow_delayed.store.conflicts import check_on_conflict

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delayed.operators.spark import DelayedSparkSendOperator

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
    "delay",
    "hold_over",
    "max_past",
)


#: A secret in the middle of an option's value, such as a connection string.
_PARAMETER = re.compile(
    r"(?:^|[?&;,\s])(?:password|passwd|pwd|accountkey|sharedaccesskey|secret|token)\s*=", re.IGNORECASE
)


def check_spark_arguments(operator: DelayedSparkSendOperator) -> None:
    """Check what is known when a DAG is parsed.

    :raises ValueError: an argument says nothing, or contradicts another.
    """
    given = [name for name in ("table", "source", "query") if getattr(operator, name) is not None]
    if not given or ("table" in given and len(given) > 1):
        raise ValueError(f"give table=, source=, query=, or source= with a query= over it; given: {given or 'none'}")
    if operator.delay is not None and operator.due_at is not None:
        raise ValueError("delay= and due_at= say the same thing; give one of them")
    for name, choices in (
        ("past_due", ("fail", "send", "skip")),
        ("on_empty", ("warn", "fail", "skip")),
        ("unknown_columns", ("fail", "ignore")),
        ("connections", ("file", "cluster")),
    ):
        if getattr(operator, name) not in choices:
            raise ValueError(f"{name}={getattr(operator, name)!r} is none of {', '.join(map(repr, choices))}")
    for name in ("hold_over", "max_past"):
        span = getattr(operator, name)
        if not isinstance(span, timedelta) or span < timedelta(0):
            raise ValueError(f"{name}={span!r} must be a timedelta, and not negative")
    for name in ("batch_rows", "window", "connections_per_executor", "partitions"):
        number = getattr(operator, name)
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}={number!r} must be a whole number, 1 or more")
    if secret := secret_in(operator):
        raise ValueError(secret)
    if "{{" not in str(operator.on_conflict) and not isinstance(operator.on_conflict, XComArg):
        check_on_conflict(operator.on_conflict)


def application_arguments(
    operator: DelayedSparkSendOperator,
    context: Context,
    began: FirstTry,
    manifest: str,
    *,
    connections_file: str | None,
) -> list[str]:
    """Return the job's command line, as the arguments were rendered.

    :param began: when the task's first try began.
    :raises InvalidMessage: headers are no texts, or ``delay_from`` is no time.
    """
    anchor = began.anchor if iteration_of(context) is None else None
    if operator.delay_from is not None:
        anchor = anchor_of(operator.delay_from, context, operator.timezone)
    options = {name: _text(getattr(operator, name)) for name in _SAME}
    origin = origin_of(context)
    options |= {
        "deliver": operator.conn_id,
        "store": operator.store_conn_id or "",
        "headers": _headers(headers_of(operator.headers)),
        "id_columns": operator.id_columns
        if isinstance(operator.id_columns, str)
        else ",".join(operator.id_columns or ()),
        "scope": json.dumps(origin.parts),
        "origin": json.dumps({name: value for name, value in asdict(origin).items() if value is not None}),
        "anchor": UNKNOWN if anchor is None else anchor.isoformat(),
        "began": began.began.isoformat(),
        "connections": _text(operator.connections_per_executor),
        "connections_file": connections_file or "",
        "attempts": _plain_url(operator.attempts) if operator.attempts else "",
        "manifest": _plain_url(manifest),
        "dry_run": "true" if operator.only_plan else "",
    }
    if operator.on_conflict != "error":
        options["on_conflict"] = check_on_conflict(operator.on_conflict)
    arguments = []
    for name in ("table", "source", "query"):
        if value := getattr(operator, name):
            arguments += [f"--{name}", str(value)]
    if operator.source:
        arguments += ["--format", operator.source_format]
        if operator.source_schema:
            arguments += ["--schema", operator.source_schema]
        for name, value in (operator.source_options or {}).items():
            arguments += ["--read", f"{name}={value}"]
    if operator.partitions:
        arguments += ["--partitions", str(operator.partitions)]
    if operator.check_first:
        arguments.append("--check-first")
    for name, value in options.items():
        if value:
            arguments += ["--set", f"{name}={value}"]
    return arguments


def secret_in(operator: DelayedSparkSendOperator) -> str | None:
    """Return what to do about an argument with a secret in it, as far as names and addresses show one, or None."""
    shows = "Spark-submit's command line and Airflow's UI would show it."
    configured = (
        "Spark's own configuration has a place for it (spark-defaults.conf: spark.hadoop.* for files, a catalog of"
        " spark.sql.catalog.* for a database, and then table=)"
    )
    options = operator.source_options if isinstance(operator.source_options, Mapping) else {}
    for name, value in options.items():
        if is_secret(str(name)) or secrets_of(str(value)) or _PARAMETER.search(str(value)):
            return f"source_options[{name!r}] is, or has, a password, token or key. {shows} {configured}"
    for name in ("source", "manifest", "attempts"):
        if secrets_of(str(getattr(operator, name) or "")):
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


def _headers(headers: Any) -> str:
    if headers is None:
        return ""
    if not isinstance(headers, Mapping) or not all(isinstance(part, str) for pair in headers.items() for part in pair):
        raise InvalidMessage("headers", "must be a dictionary of text to text")
    return json.dumps(dict(headers))


def _plain_url(url: str) -> str:
    """Return a URL without the Airflow connection that it may name, of which Spark knows nothing."""
    parts = parse(url)
    if parts is None or not parts.user:
        return url
    return url.replace(f"{parts.user}@", "", 1)
