"""Rules for the columns and rows of all sources, and RowBatch, in which every source yields its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import repeat
from typing import Any
from zoneinfo import ZoneInfo

from airflow_delayed.errors import UnsupportedColumns, some
from airflow_delayed.fields import FIELD_NAMES, FIELDS
from airflow_delayed.message import DelayedMessage

#: Most headers of a row. Brokers take fewer: SQS ten, RabbitMQ what a frame of 128 KiB holds.
MAX_HEADERS = 10_000
#: Most columns of a file, a table or a query: each costs memory and time before the first row is read.
MAX_COLUMNS = 10_000
#: Rows in memory at a time,
BATCH_ROWS = 8192
#: and bytes of them.
BATCH_BYTES = 64 * 1024 * 1024
NULL_ID = "is null; fill it, or leave it out to have ids made"
#: The column of a rejected row's problem; it is ignored, so that the mended file can be a source itself.
REJECTED = "rejected"

#: The known columns, and their types. ``value`` and ``body`` are two names of one column.
COLUMNS: Mapping[str, str] = {
    "destination": "text",
    "value": "text or binary",
    "body": "text or binary",
    "due_at": "a timestamp",
    "delay_seconds": "a number",
    "spread_seconds": "a number",
    "headers": "a map of text to text",
    "message_id": "text",
    **{one.name: one.wanted for one in FIELDS},
    "timezone": "text",
}

#: The names of a source's columns by ours, where no ``columns=`` is given.
_SAME: Mapping[str, str] = {name: name for name in COLUMNS}

_REMEDIES: Mapping[str, str] = {
    "text": "cast({0} as string) makes it, or hex({0}) of bytes that are no text",
    "text or binary": "to_json({0}) makes text of a structure, and cast({0} as string) of a number",
    "a number": "cast({0} as double) makes one",
    "a map of text to text": (
        "cast({0} as map<string, string>) makes one of another map, and from_json({0}, 'map<string, string>') of text"
    ),
}


def check_names(names: Sequence[str], origin: str) -> None:
    """Check the names of all columns of a source, before more than their names is read."""
    check_count(len(names), origin)
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise UnsupportedColumns(f"{origin} has more than one column {some(twice, separator=', ')}; rename one")


def check_count(columns: int, origin: str) -> None:
    """Check how many columns a source has."""
    if columns > MAX_COLUMNS:
        raise UnsupportedColumns(
            f"{origin} has {columns:,} columns, and at most {MAX_COLUMNS:,} are read; write only columns that a message"
            f" has ({', '.join(COLUMNS)}) and those of id_columns="
        )


def check_renames(columns: object) -> None:
    """Check ``columns=``: names of a source's columns by ours."""
    if columns is None:
        return
    if not isinstance(columns, Mapping) or not all(isinstance(name, str) and name for name in columns.values()):
        raise ValueError(
            "columns= must be a dictionary that has, by our name of a column, the source's: {'value': 'text'}"
        )
    if unknown := sorted(str(name) for name in columns if name not in COLUMNS):
        raise ValueError(
            f"columns= has {some(unknown, separator=', ')}, and its keys are our names: {', '.join(COLUMNS)}; the"
            " source's own are its values, as in {'value': 'text'}"
        )
    if "value" in columns and "body" in columns:
        raise ValueError("columns= has both value and body, which are two names of one thing; leave one out")


def names_of(columns: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the names of a source's columns that are read, by our names; a renamed column has its new name alone."""
    if not columns:
        return _SAME
    bodies = {"value", "body"} if {"value", "body"} & columns.keys() else set()
    others = COLUMNS.keys() - columns.keys() - set(columns.values()) - bodies
    return {name: columns.get(name, name) for name in COLUMNS if name in columns or name in others}


def label(name: str, source: str) -> str:
    """Name a column for a person: by the source's name, and by ours if that is another one."""
    return name if name == source else f"{source} ({name})"


def wrong_type(source: str, kind: str, name: str, *, is_text: bool) -> str:
    """Return the problem of a source's column of a wrong type, and how the right one is made of it."""
    wanted = COLUMNS[name]
    problem = f"column {label(name, source)} is {kind}, and must be {wanted}"
    name = source
    if wanted != "a timestamp":
        return f"{problem}; in Spark {_REMEDIES[wanted].format(name)}"
    if is_text:
        return f"{problem}; in Spark to_timestamp({name}) makes one, in pandas to_datetime({name}, utc=True)"
    return (
        f"{problem}; in Spark timestamp_seconds({name}), timestamp_millis or timestamp_micros makes one of a number,"
        f" and cast({name} as timestamp) of a date; in pandas to_datetime({name}, unit='s', utc=True)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Consecutive rows of one file or list.

    :param broken: rows that could not be read, by index: the column, and the reason.
    :param rows: the rows as they came, where they are dictionaries; columns that are not read are in these alone.
    :param is_table: all rows have the same columns, so that a null in one of ids is an error.
    :param records: the same rows as an Arrow record batch, without the columns of ``partition``, for all rows alike.
    :param wall_clocks: the columns whose times have no time zone, and by which type or schema.
    """

    columns: Mapping[str, Sequence[object]]
    size: int
    origin: str
    first_row: int = 1
    broken: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    rows: Sequence[Mapping[str, object]] | None = field(default=None, repr=False)
    is_table: bool = False
    records: Any = field(default=None, repr=False)
    partition: Mapping[str, str | None] = field(default_factory=dict)
    wall_clocks: Mapping[str, str] = field(default_factory=dict)

    def place(self, index: int) -> str:
        """Name a row for a person."""
        return f"{self.origin} row {self.first_row + index:,}"

    def values(self, name: str) -> Iterator[object]:
        """Return a column that is read; null where there is none."""
        if name in self.columns:
            return iter(self.columns[name])
        if self.rows is not None:
            return (row.get(name) for row in self.rows)
        return repeat(None, self.size)

    def row(self, index: int) -> dict[str, object]:
        """Return one row."""
        if self.rows is not None:
            return dict(self.rows[index])
        return {name: values[index] for name, values in self.columns.items()}


class TooManyHeaders:
    """In place of more headers than a row may have, which are not read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __str__(self) -> str:
        return f"{self.count:,} headers"


def batch_of(
    rows: Sequence[Mapping[str, object]],
    origin: str,
    first_row: int = 1,
    broken: Mapping[int, tuple[str, str]] | None = None,
) -> RowBatch:
    """Make a batch of dictionaries; a field that a row lacks is null. Other names than ours are in its rows alone."""
    names = {name for row in rows for name in COLUMNS.keys() & row.keys()}
    columns = {name: [row.get(name) for row in rows] for name in names}
    return RowBatch(columns=columns, size=len(rows), origin=origin, first_row=first_row, broken=broken or {}, rows=rows)


def row_of(message: DelayedMessage) -> dict[str, object]:
    """Return a message as a row, without fields that are None."""
    row = {
        "destination": message.destination,
        "value": message.body,
        "due_at": message.due_at,
        "headers": dict(message.headers),
        "message_id": message.message_id,
        **{name: getattr(message, name) for name in FIELD_NAMES},
    }
    return {name: value for name, value in row.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRules:
    """Rules for the names of a source's columns: what all rows have in common needs no column.

    :param columns: the source's names of columns, by ours; if it is given, unknown columns are ignored, and no error.
    """

    destination: bool = False
    due: bool = False
    id_columns: tuple[str, ...] = ()
    columns: Mapping[str, str] | None = None
    #: The source's names of the columns that a message is made of, by ours.
    names: Mapping[str, str] = field(init=False, repr=False, compare=False)
    _used: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", names_of(self.columns))
        object.__setattr__(self, "_used", frozenset([*self.names.values(), *self.id_columns]))

    def check(self, columns: Collection[str], origin: str) -> None:
        """Check the names of the columns that all rows of a source have; raise UnsupportedColumns."""
        self.check_renamed(self.renamed() - set(columns), origin, self._problems(columns))

    def renamed(self) -> set[str]:
        """Return the names of the source's columns that ``columns`` has."""
        return set((self.columns or {}).values())

    def check_renamed(self, missing: Collection[str], origin: str, others: Sequence[str] = ()) -> None:
        """Check that the source has all columns that ``columns`` names."""
        problems = [
            f"no column {label(name, source)}, which columns= names"
            for name, source in (self.columns or {}).items()
            if source in missing
        ]
        if problems or others:
            raise UnsupportedColumns(f"{origin}: {'; '.join([*problems, *others])}")

    def _problems(self, columns: Collection[str]) -> list[str]:
        problems = [*self._missing(columns), *self._contradictions(columns)]
        unknown = sorted(set(columns) - self._used - {REJECTED})
        in_capitals = [name for name in unknown if name.lower() in COLUMNS]
        if in_capitals and (problems or self.columns is None):
            problems.append(
                f"{some(in_capitals, separator=', ')}: names are in lower case; columns= has what others mean"
            )
            unknown = [name for name in unknown if name not in in_capitals]
        if unknown and self.columns is None:
            problems.append(
                f"unknown columns {some(unknown, separator=', ')} (known are {', '.join(COLUMNS)}); pass columns=,"
                " where columns={'value': 'text'} reads text as value and ignores columns that mean nothing, as does"
                " columns={}; or drop them, or name them in id_columns="
            )
        return problems

    def problem(self, row: Mapping[str, object]) -> tuple[str, str] | None:
        """Return the column and the problem of one row whose field names or id break the rules, or None."""
        return self.names_problem(row) or self.id_problem(row)

    def names_problem(self, row: Mapping[str, object]) -> tuple[str, str] | None:
        """Return the column and the problem of one row whose field names break the rules, or None."""
        if not all(isinstance(name, str) for name in row):
            return "fields", "have a name that is not text"
        if problems := self._problems(row):
            return "fields", "; ".join(problems)
        return None

    def id_problem(self, row: Mapping[str, object]) -> tuple[str, str] | None:
        """Return the column and the problem of one row whose id is null, or None."""
        source = self.names.get("message_id")
        if source is None or row.get(source) is not None:
            return None
        # a row may lack it, unless it is named
        is_null = source in row or "message_id" in (self.columns or {})
        return (self.label("message_id"), NULL_ID) if is_null else None

    def label(self, name: str) -> str:
        """Name one of our columns for a person."""
        return label(name, self.names.get(name, name))

    def uses(self, column: str) -> bool:
        """Return whether a source's column is read."""
        return column in self._used

    def meanings(self, column: str) -> list[str]:
        """Return our names of a source's column: none if it is read for an id alone."""
        return [name for name, source in self.names.items() if source == column]

    def row_of(self, message: DelayedMessage) -> dict[str, object]:
        """Return a message as a row with the source's names, without fields that are None."""
        row = row_of(message)
        if "value" not in self.names:
            row["body"] = row.pop("value")
        return {self.names[name]: value for name, value in row.items() if name in self.names}

    def _missing(self, columns: Collection[str]) -> list[str]:
        missing = {name for name in COLUMNS if self.names.get(name) not in columns}
        problems = []
        if {"value", "body"} <= missing:
            value = "value (or body)" if {"value", "body"} <= self.names.keys() else None
            value = value or self.label("value" if "value" in self.names else "body")
            problems.append(f"no column {value}: what is to be sent?")
        if "destination" in missing and not self.destination:
            problems.append(f"no column {self.label('destination')}; add it, or give destination=")
        if {"due_at", "delay_seconds"} <= missing and not self.due:
            names = f"{self.label('due_at')} or {self.label('delay_seconds')}"
            problems.append(f"no column {names}; add one, or give due_at= or delay=")
        problems += [f"no column {name}, which id_columns= names" for name in self.id_columns if name not in columns]
        return problems

    def _contradictions(self, columns: Collection[str]) -> list[str]:
        problems = []
        if self.names.get("value") in columns and self.names.get("body") in columns:
            problems.append("both value and body, which are two names of one thing; drop one")
        if self.names.get("message_id") in columns and self.id_columns:
            problems.append(f"a column {self.label('message_id')}, and id_columns= too; leave one of them out")
        return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """Values for rows without a column of that name, or with a null in it.

    :param anchor: the time that relative delays count from, by default the start of the task's first try; None: it is
        not known.
    :param spread: a message is due within so long after its time, by a hash of its id.
    :param zone: the time zone of times without an offset, in rows without a ``timezone`` of their own; without either
        they are an error.
    :param columns: see ColumnRules; ``id_columns`` and ``delay_from`` are the source's names.
    """

    anchor: datetime | None
    scope: bytes = b""
    destination: str | None = None
    due_at: datetime | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    message_id: str | None = None
    id_columns: tuple[str, ...] = ()
    optional: Mapping[str, Any] = field(default_factory=dict)
    spread: timedelta = timedelta(0)
    zone: ZoneInfo | None = None
    columns: Mapping[str, str] | None = None
