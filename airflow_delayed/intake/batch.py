"""Rows on their way to become messages: some columns of equal length, and where they come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from airflow_delayed.message import DelayedMessage

#: What a file of rejects says of a row; passed over, so that the mended file can be a source itself.
REJECTED = "rejected"

#: Columns that mean something, and what they may be. ``value`` and ``body`` are two names of one thing.
COLUMNS: Mapping[str, str] = {
    "destination": "text",
    "value": "text or binary",
    "body": "text or binary",
    "due_at": "a timestamp",
    "delay_seconds": "a number",
    "headers": "a map of text to text",
    "message_id": "text",
    "tag": "text",
    "expires_at": "a timestamp",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Consecutive rows of one file or list.

    :param origin: the file's path, or how the list is called.
    :param first_row: the number of the first row in its origin, counted from 1.
    :param broken: rows that could not be read, by index: what is at fault, and why.
    :param rows: the rows as they came, where they are dictionaries; columns that are not read are in these alone.
    :param ids_given: the rows have a column of ids, so that a null in it is an error.
    :param records: the same rows as an Arrow record batch, without the columns of ``partition``, for all rows alike.
    """

    columns: Mapping[str, Sequence[object]]
    size: int
    origin: str
    first_row: int = 1
    broken: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    rows: Sequence[Mapping[str, object]] | None = field(default=None, repr=False)
    ids_given: bool = False
    records: Any = field(default=None, repr=False)
    partition: Mapping[str, str | None] = field(default_factory=dict)

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


def batch_of(
    rows: Sequence[Mapping[str, object]],
    origin: str,
    first_row: int = 1,
    broken: Mapping[int, tuple[str, str]] | None = None,
) -> Batch:
    """Make a batch of dictionaries; what a row lacks is null.

    Columns are made of the names in :data:`COLUMNS` alone: of others each row may have its own.
    """
    names = {name for row in rows for name in COLUMNS.keys() & row.keys()}
    columns = {name: [row.get(name) for row in rows] for name in names}
    return Batch(columns=columns, size=len(rows), origin=origin, first_row=first_row, broken=broken or {}, rows=rows)


def row_of(message: DelayedMessage) -> dict[str, object]:
    """Return a message as a row, without what it does not say."""
    row = {
        "destination": message.destination,
        "value": message.body,
        "due_at": message.due_at,
        "headers": dict(message.headers),
        "message_id": message.message_id,
        "tag": message.tag,
        "expires_at": message.expires_at,
    }
    return {name: value for name, value in row.items() if value is not None}
