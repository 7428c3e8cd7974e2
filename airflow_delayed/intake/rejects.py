"""Rows that are set aside: written as JSON lines, to be mended and sent by themselves."""

from __future__ import annotations

import base64
import json
import os
import posixpath
import re
from datetime import date, datetime
from types import TracebackType
from typing import Any

from airflow_delayed.addresses import shown
from airflow_delayed.errors import InputError
from airflow_delayed.intake.batch import REJECTED
from airflow_delayed.intake.private import is_local, private
from airflow_delayed.intake.rows import Problem


class Rejects:
    """A file of rows that could not be sent: each with its own columns, and in ``rejected`` what is wrong with it.

    Mended, the file is a source itself. Each try of a run writes it again, and is not there if nothing is set
    aside. What another run has left under the path is moved beside it, under that run's name: its rows are nowhere
    else. On this machine the file is made new, and only its owner may read it. Bytes are written as text; those that
    are no UTF-8 as ``{"base64": "..."}``, which has to be decoded by hand.

    :param run: names the run of the task; it stands in each row.
    :raises InputError: the path holds something that is not a file of rejects, or is a link.
    """

    def __init__(self, fs: Any, path: str, run: str) -> None:
        self.path = path
        self.run = run
        self.count = 0
        #: Where the rows of an earlier run are now.
        self.moved_to: str | None = None
        self._fs = fs
        self._file: Any = None
        self._local = is_local(fs)
        if self._local and os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
            raise self._taken("is a link or a folder")
        if not fs.exists(path):
            return
        if (other := self._run_of_file()) == run:
            fs.rm(path)
        else:
            stem, ending = posixpath.splitext(path)
            self.moved_to = f"{stem}.{re.sub('[^A-Za-z0-9._-]', '-', other)}{ending}"
            # of a local file this replaces what has the new name, and moves nothing into a folder
            (os.replace if self._local else fs.mv)(path, self.moved_to)

    def _run_of_file(self) -> str:
        try:
            with self._fs.open(self.path, "rt", encoding="utf-8") as file:
                return str(json.loads(file.readline())[REJECTED]["run"])
        except (OSError, ValueError, LookupError, TypeError):
            raise self._taken("is there already and holds no rejected rows") from None

    def _taken(self, why: str) -> InputError:
        return InputError(f"rejects={shown(self.path)} {why}; give rejects= a path of its own")

    def _new(self) -> Any:
        if not self._local:
            return self._fs.open(self.path, "wt", encoding="utf-8")
        try:
            return open(self.path, "x", encoding="utf-8", opener=private)
        except FileExistsError:
            raise self._taken("was made by somebody else meanwhile") from None

    def add(self, problem: Problem) -> None:
        """Write one row."""
        if self._file is None:
            parent = self._fs._parent(self.path)
            if parent:
                self._fs.makedirs(parent, exist_ok=True)
            self._file = self._new()
        line = {str(name): _written(value) for name, value in problem.row.items() if value is not None}
        line[REJECTED] = {"run": self.run, "place": problem.place, "column": problem.column, "problem": problem.problem}
        self._file.write(json.dumps(line) + "\n")
        self.count += 1

    def __enter__(self) -> Rejects:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def _written(value: object) -> object:
    try:
        plain = _plain(value)
        json.dumps(plain)
    except (RecursionError, ValueError):
        # from messages= alone, where it still is: JSON lines as deep are set aside as lines
        return {"unwritten": f"a {type(value).__name__} nested too deep, or a number of too many digits"}
    return plain


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
