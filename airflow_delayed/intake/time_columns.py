"""TimeColumn: whether the timestamps of a Parquet file are instants, by their type and by the schema in its footer.

Spark writes ``timestamp`` as INT96, a type that knows no time zones, and keeps its own schema in the file's footer; so
do Iceberg and pandas. A footer is foreign input: a schema that is too large, too deep or malformed counts as none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from airflow_delayed.errors import UnsupportedColumns
from airflow_delayed.intake.rows import is_deep
from airflow_delayed.message import UTC

#: The longest schema of a footer that is read, in bytes: some ten thousand columns. As Python's objects it is 50 times
#: as large.
MAX_SCHEMA = 1024 * 1024

#: By the name of a column: whether it has instants, and the words for that.
Schema = Mapping[str, tuple[bool, str]]

#: The keys of a footer, and which types of their schemas are instants.
_STRUCTS: Mapping[bytes, tuple[str, Mapping[str, bool]]] = {
    b"org.apache.spark.sql.parquet.row.metadata": ("Spark's schema", {"timestamp": True, "timestamp_ntz": False}),
    b"iceberg.schema": (
        "Iceberg's schema",
        {"timestamptz": True, "timestamptz_ns": True, "timestamp": False, "timestamp_ns": False},
    ),
}
_PANDAS = b"pandas"
_PANDAS_TYPES = {"datetimetz": True, "datetime": False}

_SPARK_VERSION = b"org.apache.spark.version"
_VERSION = re.compile(rb"(\d{1,4})\.(\d{1,4})(?!\d)")
#: By physical type: the key of a footer whose times are of the calendar before 1582, and the release of Spark from
#: which on a file without that key has none of these.
_OLD_CALENDAR: Mapping[str, tuple[bytes, tuple[int, int]]] = {
    "INT96": (b"org.apache.spark.legacyINT96", (3, 1)),
    "INT64": (b"org.apache.spark.legacyDateTime", (3, 0)),
}
#: From here on the calendars agree, and so do the offsets that Spark has for them.
_AGREED = pa.scalar(datetime(1900, 1, 1, tzinfo=UTC), pa.timestamp("us", tz="UTC"))
_BEFORE_1900 = (
    "is before 1900, in a file whose times are of an old calendar or may be (Spark's rebase mode LEGACY, or a Spark"
    " before 3.1); write it with Spark 3.1 or later and spark.sql.parquet.int96RebaseModeInWrite=CORRECTED"
    " (for TIMESTAMP_MICROS datetimeRebaseModeInWrite)"
)


class Meaning(Enum):
    """What a column of timestamps has."""

    INSTANT = "instants"
    WALL_CLOCK = "times without a time zone"
    UNKNOWN = "times of an unknown time zone"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeColumn:
    """A column of timestamps of one file."""

    name: str
    meaning: Meaning
    because: str
    old_calendar: bool = False

    def __str__(self) -> str:
        return f"{self.meaning.value} ({self.because})"

    @property
    def no_zone(self) -> str:
        """The problem of the column where no time zone is set, and what to do."""
        zone = "timezone= to name the zone in which its wall clock is read, such as timezone='Europe/Berlin'"
        if self.meaning is Meaning.UNKNOWN:
            zone = "timezone='UTC' if its writer stores UTC, as Spark does, or timezone= with the zone of its times"
        return (
            f"column {self.name} has no time zone ({self.because}); pass {zone}, or add a column timezone, or let the"
            " job that writes it make a timestamp with a time zone"
        )


def time_columns(file: pq.ParquetFile, names: Sequence[str]) -> dict[str, TimeColumn]:
    """Return those of the named columns that are timestamps."""
    zones = {
        column.name: column.type.tz
        for column in file.schema_arrow
        if column.name in names and pa.types.is_timestamp(column.type)
    }
    if not zones:
        return {}
    footer: Mapping[bytes, bytes] = file.metadata.metadata or {}
    schemas = _schemas(footer)
    columns = {}
    for index in range(len(file.schema)):
        leaf = file.schema.column(index)
        if leaf.path in zones:
            called = dict(schema[leaf.path] for schema in schemas if leaf.path in schema)
            columns[leaf.path] = _time_column(leaf, called, zones[leaf.path] is not None, footer)
    return columns


def _time_column(leaf: Any, called: Mapping[bool, str], with_zone: bool, footer: Mapping[bytes, bytes]) -> TimeColumn:
    if len(called) == 1 and _is_open(leaf):
        [(instant, because)] = called.items()
        meaning = Meaning.INSTANT if instant else Meaning.WALL_CLOCK
    elif with_zone:
        meaning, because = Meaning.INSTANT, "isAdjustedToUTC=true"
    elif leaf.physical_type != "INT96":
        meaning, because = Meaning.WALL_CLOCK, called.get(False, "isAdjustedToUTC=false")
    else:
        schemas = "schemas that contradict each other" if called else "no schema of Spark, Iceberg or pandas for it"
        meaning, because = Meaning.UNKNOWN, f"{leaf.physical_type}, and the file has {schemas}"
    return TimeColumn(
        name=leaf.path,
        meaning=meaning,
        because=because,
        old_calendar=meaning is not Meaning.WALL_CLOCK and _has_old_calendar(leaf.physical_type, footer),
    )


def _is_open(leaf: Any) -> bool:
    """Return whether a type stands for timestamps with and without a zone: INT96, and what writers before 2019 have."""
    return (
        leaf.physical_type == "INT96" or json.loads(leaf.logical_type.to_json()).get("is_from_converted_type") is True
    )


def _has_old_calendar(physical_type: str, footer: Mapping[bytes, bytes]) -> bool:
    key, first = _OLD_CALENDAR[physical_type]
    if key in footer or not any(name.startswith(b"org.apache.spark.") for name in footer):
        return key in footer
    version = _VERSION.match(footer.get(_SPARK_VERSION, b""))
    return version is None or (int(version[1]), int(version[2])) < first


def _schemas(footer: Mapping[bytes, bytes]) -> list[Schema]:
    structs = [
        _columns_of(_read(footer, key), "fields", "type", types, owner) for key, (owner, types) in _STRUCTS.items()
    ]
    return [*structs, _columns_of(_read(footer, _PANDAS), "columns", "pandas_type", _PANDAS_TYPES, "pandas' schema")]


def _read(footer: Mapping[bytes, bytes], key: bytes) -> object:
    data = footer.get(key, b"")
    if len(data) > MAX_SCHEMA:
        return None
    try:
        text = data.decode()
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return None if is_deep(text, value) else value


def _columns_of(schema: object, fields: str, kind: str, types: Mapping[str, bool], owner: str) -> Schema:
    """Return the timestamps of a schema: a list of objects, whose names differ. An index of pandas may have none."""
    entries = schema.get(fields) if isinstance(schema, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return {}
    named = [(entry["name"], entry.get(kind)) for entry in entries if entry.get("name") is not None]
    if not all(isinstance(name, str) for name, _ in named) or len(dict(named)) < len(named):
        return {}
    return {
        name: (types[type_name], f"{type_name} in {owner}")
        for name, type_name in named
        if isinstance(type_name, str) and type_name in types
    }


class TimeColumnsOfFiles:
    """The time columns of the files of one source, which must have the same meaning in all."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str, TimeColumn]] = {}

    def add(self, file: str, columns: Mapping[str, TimeColumn]) -> None:
        """Compare a file with those before; raise UnsupportedColumns if a column has instants in only one of them."""
        for name, column in columns.items():
            first, other = self._first.setdefault(name, (file, column))
            if other.meaning is not column.meaning:
                raise UnsupportedColumns(
                    f"column {name} has {other} in {first} and {column} in {file}; write all files of a source"
                    " alike, or send them by tasks of their own"
                )


def with_zones(records: pa.RecordBatch, columns: Mapping[str, TimeColumn]) -> pa.RecordBatch:
    """Return records whose instants have a time zone, and whose other times have none."""
    arrays = [
        _with_zone(array, columns[name].meaning is Meaning.INSTANT) if name in columns else array
        for name, array in zip(records.schema.names, records.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, records.schema.names)


def _with_zone(times: pa.Array, is_instant: bool) -> pa.Array:
    # the stored numbers stay: they are UTC's
    return (
        times
        if (times.type.tz is not None) is is_instant
        else times.view(pa.timestamp(times.type.unit, tz="UTC" if is_instant else None))
    )


def of_old_calendar(records: pa.RecordBatch, columns: Mapping[str, TimeColumn]) -> dict[int, tuple[str, str]]:
    """Return the rows with times before 1900 that may be of another calendar."""
    broken: dict[int, tuple[str, str]] = {}
    for name, column in columns.items():
        if column.old_calendar:
            times = records.column(name)
            early = pc.less(times, _AGREED.cast(times.type))
            broken |= dict.fromkeys(pc.indices_nonzero(early).to_pylist(), (name, _BEFORE_1900))
    return broken
