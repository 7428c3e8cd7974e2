"""The options of ``format("delayed")``: names and sizes, never a secret, for Spark shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar, cast

from airflow_delayed.clock import resolve, zone
from airflow_delayed.errors import InputError, UnsupportedOption
from airflow_delayed.fields import FIELD_NAMES, FIELDS
from airflow_delayed.identity import Origin, scope_of
from airflow_delayed.intake.columns import ColumnRules, RowRules, check_renames
from airflow_delayed.message import TRACEPARENT, TRACESTATE, UTC, delay_of, due_after, parse_time, utc
from airflow_delayed.provider_info import HOLD_OVER, MAX_PAST
from airflow_delayed.store.policy import OnConflict, check_on_conflict

#: All options, as :class:`airflow_delayed.spark.sink.DelayedDataSource` describes them.
NAMES = (
    *("deliver", "destination", "store", "hold_over", "until_due", "on_conflict", "delay", "due_at", "headers"),
    *("headers_file", *FIELD_NAMES, "spread", "id_columns", "scope", "origin", "anchor", "began", "timezone"),
    *("past_due", "max_past", "columns", "envelope", "batch_rows", "window"),
    *("connections", "connections_file", "attempts", "manifest", "dry_run", "traceparent", "tracestate"),
)
#: Options that are texts, as they are.
_TEXTS = ("store", "envelope", "connections_file", "headers_file", "attempts", "manifest")
#: The anchor of a job without one: it refuses relative delays.
UNKNOWN = "unknown"
#: Messages given to a transport at a time.
BATCH_ROWS = 5000
_FIRST = datetime.min.replace(tzinfo=UTC)
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options, read once in the driver; every attempt at every partition uses them.

    :param oldest: a message due before it is past due.
    """

    deliver: str
    rules: RowRules
    wanted: ColumnRules
    store: str | None
    hold_over: timedelta
    until_due: bool
    on_conflict: OnConflict | None
    origin: Origin | None
    past_due: str
    max_past: timedelta
    oldest: datetime
    envelope: str | None
    batch_rows: int
    window: int | None
    connections: int | None
    connections_file: str | None
    headers_file: str | None
    attempts: str | None
    manifest: str | None
    dry_run: bool
    trace: Mapping[str, str]


def settings_of(options: Mapping[str, str], now: datetime) -> Settings:
    """Read the options."""
    given = {name: value for name, value in options.items() if value is not None and value.strip()}
    if unknown := sorted(given.keys() - set(NAMES)):
        raise InputError(f"unknown options {', '.join(unknown)}; known are {', '.join(NAMES)}")
    if "deliver" not in given:
        raise InputError("the option deliver is missing: the name of the connection that delivers")
    _check_together(given)
    read = _Reader(given)
    anchor = None if given.get("anchor") == UNKNOWN else read.moment("anchor") or now
    began = read.moment("began") or anchor or now
    max_past = read.span("max_past", timedelta(seconds=MAX_PAST))
    until_due = read.choice("until_due", "false", "true") == "true"
    hold_over = read.span("hold_over", timedelta(seconds=0 if until_due else HOLD_OVER))
    if until_due and (hold_over or "store" not in given):
        raise InputError("until_due=true lets all messages wait in a store: give the option store, and no hold_over")
    return Settings(
        deliver=given["deliver"],
        rules=_rules(read, anchor),
        wanted=ColumnRules(
            destination="destination" in given,
            due="delay" in given or "due_at" in given,
            id_columns=_names(given.get("id_columns", "")),
            columns=read.one("columns", _columns),
        ),
        **{name: given.get(name) for name in _TEXTS},
        hold_over=hold_over,
        until_due=until_due,
        on_conflict=read.one("on_conflict", check_on_conflict),
        origin=read.one("origin", _origin),
        past_due=read.choice("past_due", "fail", "send", "skip"),
        max_past=max_past,
        oldest=began - max_past if max_past < began - _FIRST else _FIRST,
        batch_rows=read.one("batch_rows", _number) or BATCH_ROWS,
        window=read.one("window", _number),
        connections=read.one("connections", _number),
        dry_run=read.choice("dry_run", "false", "true") == "true",
        trace=_trace(read),
    )


def _check_together(given: Mapping[str, str]) -> None:
    if "delay" in given and "due_at" in given:
        raise InputError("the options delay and due_at say the same thing; give one of them")
    if "headers" in given and "headers_file" in given:
        raise InputError("the options headers and headers_file say the same thing; give one of them")
    if given.get("store") == given["deliver"]:
        raise InputError("the options deliver and store name one connection; leave store out")
    if "envelope" in given and "store" in given:
        raise InputError(
            "envelope cannot go with store, whose dispatcher delivers as the connection says; set the extra of"
            f" {given['deliver']!r} instead"
        )


def _rules(read: _Reader, anchor: datetime | None) -> RowRules:
    where = read.one("timezone", zone)

    def moment(column: str) -> Callable[[str], datetime]:
        def parse(text: str) -> datetime:
            parsed = parse_time(column, text)
            if where is not None and parsed.utcoffset() is None:
                return resolve(column, parsed, where)[0]
            return utc(column, parsed)

        return parse

    due_at = read.one("due_at", moment("due_at"))
    if (delay := read.one("delay", delay_of)) is not None:
        due_at = due_after(anchor, delay)
    return RowRules(
        anchor=anchor,
        scope=read.one("scope", _scope) or b"",
        destination=read.given.get("destination"),
        due_at=due_at,
        headers=read.one("headers", headers_of) or {},
        id_columns=_names(read.given.get("id_columns", "")),
        optional={
            one.name: read.one(one.name, moment(one.name) if one.type is datetime else one.type) for one in FIELDS
        },
        spread=read.span("spread", timedelta(0)),
        zone=where,
        columns=read.one("columns", _columns),
    )


def _trace(read: _Reader) -> Mapping[str, str]:
    if (parent := read.one(TRACEPARENT, _traceparent)) is None:
        return {}
    state = read.one(TRACESTATE, _tracestate)
    return {TRACEPARENT: parent} | ({TRACESTATE: state} if state else {})


def _traceparent(text: str) -> str:
    if not re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", text):
        raise ValueError("it must be a traceparent of W3C Trace Context, 00-<32 digits>-<16 digits>-<2 digits>")
    return text


def _tracestate(text: str) -> str:
    if not re.fullmatch("[ -~]{1,512}", text):
        raise ValueError("it must be 1 to 512 printable ASCII characters")
    return text


class _Reader:
    """Parses options by name."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.given = given

    def one(self, name: str, parse: Callable[[str], _Value]) -> _Value | None:
        if name not in self.given:
            return None
        try:
            return parse(self.given[name])
        except (InputError, ValueError) as error:
            raise InputError(f"the option {name} cannot be read: {error}") from None

    def moment(self, name: str) -> datetime | None:
        return self.one(name, lambda text: utc(name, parse_time(name, text)))

    def span(self, name: str, default: timedelta) -> timedelta:
        found = self.one(name, _span)
        return default if found is None else found

    def choice(self, name: str, *choices: str) -> str:
        """Return an option that is one of a few, by default the first."""
        value = self.given.get(name, choices[0]).lower()
        if value not in choices:
            raise InputError(f"the option {name}={value!r} is none of {', '.join(map(repr, choices))}")
        return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _columns(text: str) -> Mapping[str, str]:
    columns: Any = json.loads(text)
    # a JSON null would pass for an option that is not given
    check_renames([] if columns is None else columns)
    return cast(Mapping[str, str], columns)


def _span(text: str) -> timedelta:
    try:
        return delay_of(text)
    except InputError:
        raise ValueError("it must be a number of seconds, or an ISO 8601 duration such as PT10M") from None


def _number(text: str) -> int:
    if not (text.strip().isdigit() and int(text) > 0):
        raise ValueError("it must be a whole number, 1 or more")
    return int(text)


def _scope(text: str) -> bytes:
    if not text.lstrip().startswith("["):
        return scope_of(text)
    parts = json.loads(text)
    if not all(isinstance(part, str | int) for part in parts):
        raise ValueError("it must be text, or a JSON list of texts and whole numbers")
    return scope_of(*parts)


def _origin(text: str) -> Origin:
    try:
        names: Any = json.loads(text)
        numbers = {name: names[name] for name in ("map_index", "iteration") if name in names}
        texts = {name: names[name] for name in ("dag_id", "run_id", "task_id")}
        known = names.keys() <= {*numbers, *texts}
        known &= all(type(number) is int for number in numbers.values())
        # only the message of a run itself has no task
        known &= all(isinstance(name, str) for name in texts.values()) and texts["task_id"] != ""
    except (ValueError, KeyError, AttributeError, TypeError):
        known = False
    if not known:
        raise ValueError('it must be a JSON object, {"dag_id": "d", "run_id": "r", "task_id": "t", "map_index": -1}')
    return Origin(**texts, **numbers)


def headers_of(text: str) -> Mapping[str, str]:
    """Return headers from a JSON object."""
    try:
        headers: Any = json.loads(text)
    except ValueError:
        headers = None
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise ValueError('it must be a JSON object of text to text, {"content-type": "application/json"}')
    return headers


def check_type(settings: Settings, conn_type: str, *, holds: bool) -> None:
    """Check the options against the type of the connection that delivers."""
    if holds and settings.store is not None:
        raise InputError(f"connection {settings.deliver!r} stores its messages itself; leave the option store out")
    if not holds and settings.store is None and settings.on_conflict not in (None, "error"):
        raise UnsupportedOption(settings.deliver, conn_type, ["on_conflict"])
