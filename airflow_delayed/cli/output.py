"""Showing rows as a table, as JSON, as YAML, or plain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import Any

from airflow_delayed.errors import one_line

Row = Mapping[str, Any]


def show(rows: Sequence[Row], output: str, columns: Sequence[str] | None = None) -> None:
    """Print rows. JSON and YAML have numbers as numbers, times in ISO 8601 and null for nothing.

    :param columns: what a table shows, and JSON and YAML do not leave out.
    """
    from airflow.cli.simple_table import AirflowConsole
    from rich.markup import escape

    console, values = AirflowConsole(), plain(rows)
    if output == "json":
        console.print_as_json(values)
    elif output == "yaml":
        console.print_as_yaml(values)
    else:
        # rich reads markup in a table
        shown = escape if output == "table" else str
        console.print_as(
            [{shown(_cell(name)): shown(_cell(row[name])) for name in columns or row} for row in values], output
        )


def plain(value: Any) -> Any:
    """Return a value made of what JSON and YAML know."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(plain(name)): plain(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(one) for one in value]
    return value


def _cell(value: Any) -> str:
    """Return a value as text that controls no terminal and begins no line."""
    if isinstance(value, list):
        return ", ".join(_cell(one) for one in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{_cell(name)}: {_cell(one)}" for name, one in value.items())
    return "" if value is None else one_line(str(value))
