"""Rows that are set aside: written as JSON lines, to be mended and sent by themselves."""

from __future__ import annotations

import base64
import json
from datetime import date, datetime
from types import TracebackType
from typing import Any

from airflow_delayed.intake.batch import REJECTED
from airflow_delayed.intake.rows import Problem


class Rejects:
    """A file of rows that could not be sent: each with its own columns, and in ``rejected`` what is wrong with it.

    Mended, the file is a source itself. It is written anew on each try, and is not there if nothing is set aside.
    Bytes are written as text; those that are no UTF-8 as ``{"base64": "..."}``, which has to be decoded by hand.
    """

    def __init__(self, fs: Any, path: str) -> None:
        self.path = path
        self.count = 0
        self._fs = fs
        self._file: Any = None
        if fs.exists(path):
            fs.rm(path)

    def add(self, problem: Problem) -> None:
        """Write one row."""
        if self._file is None:
            parent = self._fs._parent(self.path)
            if parent:
                self._fs.makedirs(parent, exist_ok=True)
            self._file = self._fs.open(self.path, "wt", encoding="utf-8")
        line: dict[str, object] = {str(name): _plain(value) for name, value in problem.row.items() if value is not None}
        line[REJECTED] = {"place": problem.place, "column": problem.column, "problem": problem.problem}
        self._file.write(json.dumps(line) + "\n")
        self.count += 1

    def __enter__(self) -> Rejects:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, list) and value and all(isinstance(pair, tuple) for pair in value):
        return _plain(dict(value))  # a map, as Arrow gives it
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)
