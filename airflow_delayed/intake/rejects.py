"""Rows that are set aside: written as JSON lines, to be mended and sent by themselves."""

from __future__ import annotations

import base64
import json
from datetime import date, datetime
from types import TracebackType
from typing import Any

from airflow_delayed.intake.rows import Problem


class Rejects:
    """A file of rows that could not be sent, each with its ``place``, ``column`` and ``problem``.

    The file is written anew on each try, and only when there is something to write. Bytes are in Base64.
    """

    def __init__(self, fs: Any, path: str) -> None:
        self.path = path
        self.count = 0
        self._fs = fs
        self._file: Any = None

    def add(self, problem: Problem) -> None:
        """Write one row."""
        if self._file is None:
            parent = self._fs._parent(self.path)
            if parent:
                self._fs.makedirs(parent, exist_ok=True)
            self._file = self._fs.open(self.path, "wt", encoding="utf-8")
        line = {
            "place": problem.place,
            "column": problem.column,
            "problem": problem.problem,
            "row": {name: _plain(value) for name, value in problem.row.items()},
        }
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
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
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)
