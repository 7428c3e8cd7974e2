"""Whether a DataFrame's columns are those of messages, told before the first task."""

from __future__ import annotations

from pyspark.sql.types import (
    BinaryType,
    DataType,
    MapType,
    NullType,
    NumericType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from airflow_delayed.errors import UnsupportedColumns
from airflow_delayed.intake.batch import COLUMNS
from airflow_delayed.intake.columns import Wanted


def check_columns(schema: StructType, wanted: Wanted, *, naive_ok: bool) -> None:
    """Check names and types.

    :param naive_ok: a time zone is given for timestamps that have none.
    :raises UnsupportedColumns: some are missing, mean nothing, say the same thing twice, or are of a wrong type.
    """
    names = schema.fieldNames()
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UnsupportedColumns(f"the DataFrame has more than one column {', '.join(twice)}")
    wanted.check(names, "the DataFrame")
    problems = []
    for field in schema.fields:
        kind = COLUMNS.get(field.name)
        if kind is None:
            continue
        if not _fits(kind, field.dataType):
            problems.append(f"column {field.name} is {field.dataType.simpleString()}, and must be {kind}")
        elif isinstance(field.dataType, TimestampNTZType) and not naive_ok:
            problems.append(
                f"column {field.name} has no time zone (timestamp_ntz); cast it to timestamp, or give the option"
                " timezone"
            )
    if problems:
        raise UnsupportedColumns(f"the DataFrame: {'; '.join(problems)}")


def _fits(kind: str, found: DataType) -> bool:
    if isinstance(found, NullType):
        return True
    if kind == "a timestamp":
        return isinstance(found, TimestampType | TimestampNTZType)
    if kind == "a number":
        return isinstance(found, NumericType)
    if kind == "a map of text to text":
        return (
            isinstance(found, MapType)
            and isinstance(found.keyType, StringType)
            and isinstance(found.valueType, StringType)
        )
    return isinstance(found, StringType) or (kind == "text or binary" and isinstance(found, BinaryType))
