"""Which columns a source must, may and must not have, and what holds for all of its rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from zoneinfo import ZoneInfo

from airflow_delayed.errors import UnsupportedColumns, some
from airflow_delayed.intake.batch import COLUMNS, REJECTED

NULL_ID = "is null; fill it, or leave it out to have ids made"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is given once for all rows, so that no column is needed for it, and what else is wanted.

    :param destination: a destination is given.
    :param due: a delay or a due time is given.
    :param id_columns: the columns of the key.
    :param ignore_others: further columns are passed over and no error.
    """

    destination: bool = False
    due: bool = False
    id_columns: tuple[str, ...] = ()
    ignore_others: bool = False

    def check(self, columns: Collection[str], origin: str) -> None:
        """Check the names of a source's columns.

        :raises UnsupportedColumns: some are missing, mean nothing, or say the same thing twice.
        """
        problems = [*self._missing(columns), *self._contradictions(columns)]
        unknown = sorted(set(columns) - COLUMNS.keys() - {REJECTED} - set(self.id_columns))
        if unknown and not self.ignore_others:
            problems.append(
                f"unknown columns {some(unknown, separator=', ')} (known are {', '.join(COLUMNS)}); drop them, name"
                " them in id_columns=, or pass unknown_columns='ignore'"
            )
        if problems:
            raise UnsupportedColumns(f"{origin}: {'; '.join(problems)}")

    def problem(self, row: Mapping[str, object]) -> tuple[str, str] | None:
        """Return what is wrong with the fields of one row by itself, or None: the column, and why."""
        if not all(isinstance(name, str) for name in row):
            return "fields", "have a name that is not text"
        try:
            self.check(row, "")
        except UnsupportedColumns as error:
            return "fields", str(error).removeprefix(": ")
        if "message_id" in row and row["message_id"] is None:
            return "message_id", NULL_ID
        return None

    def uses(self, column: str) -> bool:
        """Return whether a column is read."""
        return column in COLUMNS or column in self.id_columns

    def _missing(self, columns: Collection[str]) -> list[str]:
        problems = []
        if "value" not in columns and "body" not in columns:
            problems.append("no column value (or body): what is to be sent?")
        if "destination" not in columns and not self.destination:
            problems.append("no column destination; add it, or give destination=")
        if "due_at" not in columns and "delay_seconds" not in columns and not self.due:
            problems.append("no column due_at or delay_seconds; add one, or give due_at= or delay=")
        problems += [f"no column {name}, which id_columns= names" for name in self.id_columns if name not in columns]
        return problems

    def _contradictions(self, columns: Collection[str]) -> list[str]:
        problems = []
        if "value" in columns and "body" in columns:
            problems.append("both value and body, which are two names of one thing; drop one")
        if "message_id" in columns and self.id_columns:
            problems.append("a column message_id, and id_columns= too; leave one of them out")
        return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """What holds for all rows; a row's own column wins, and a null in it takes the value given here.

    :param anchor: what relative delays count from: when the task's first try began; None: that is not known.
    :param scope: what sets this run's messages apart from another's, where ids are made from content.
    :param zone: what times without an offset mean; without it they are an error.
    """

    anchor: datetime | None
    scope: bytes = b""
    destination: str | None = None
    due_at: datetime | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    message_id: str | None = None
    id_columns: tuple[str, ...] = ()
    tag: str | None = None
    expires_at: datetime | None = None
    zone: ZoneInfo | None = None
