"""Sources of rows: a list in the DAG, Parquet files, JSON lines; and the file of rejected rows, a later source.

Each source is a stream, and can be read twice.
"""

from __future__ import annotations

import base64
import json
import os
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date, datetime
from hashlib import blake2b
from itertools import islice
from types import TracebackType
from typing import Any, Protocol

from airflow_delayed.addresses import shown
from airflow_delayed.errors import InputError, SourceError
from airflow_delayed.intake.columns import BATCH_BYTES, BATCH_ROWS, REJECTED, ColumnRules, RowBatch, batch_of, row_of
from airflow_delayed.intake.files import (
    MAX_LINE,
    FileSource,
    SourceFile,
    is_local,
    iter_lines,
    link_of_another_user,
    list_files,
    private,
)
from airflow_delayed.intake.rows import TOO_DEEP, Number, Problem, is_deep, read_json, write_json
from airflow_delayed.message import DelayedMessage

#: The longest line of a file of rejects that is read, in bytes: of the longest line of a source each byte may have
#: become six.
_MAX_REJECTED = 8 * MAX_LINE
#: Longest part of a file's name that names a run, in characters.
_MAX_RUN = 120
#: Bytes of text in memory at a time: as Python's objects JSON takes several times the text.
_BATCH_TEXT = BATCH_BYTES // 4


class Source(Protocol):
    """Rows that can be read again and again."""

    name: str

    def batches(self, wanted: ColumnRules) -> Iterator[RowBatch]:
        """Yield the rows in a fixed order, in batches."""
        ...

    def fingerprint(self) -> bytes | None:
        """Return bytes that change when the rows do, and maybe also without; None: changes cannot be seen."""
        ...

    def check_unchanged(self) -> None:
        """Raise SourceError if files came, went or changed since they were read."""
        ...


class ListSource:
    """Messages given as dictionaries (or as DelayedMessage), numbered from 1."""

    def __init__(self, messages: Sequence[object], name: str = "messages") -> None:
        self.name = name
        self._messages = messages

    def batches(self, wanted: ColumnRules) -> Iterator[RowBatch]:
        """Yield the messages; a field that is wrong is a problem of its own row, since no two need have the same."""
        first, unseen = 1, wanted.renamed()
        names: Collection[object] = ()
        of_names = None
        for chunk in self.chunks(wanted):
            rows, broken = [], {}
            for index, entry in enumerate(chunk):
                row = row_of(entry) if isinstance(entry, DelayedMessage) else entry
                if isinstance(row, Mapping):
                    # most rows have the names of the row before
                    if first == 1 or row.keys() != names:
                        names, of_names = row.keys(), wanted.names_problem(row)
                        unseen.difference_update(row)
                    problem = of_names or wanted.id_problem(row)
                else:
                    kind = type(row).__name__
                    row, problem = {}, ("message", f"must be a dictionary or a DelayedMessage, not {kind}")
                rows.append(row)
                if problem:
                    broken[index] = problem
            yield batch_of(rows, self.name, first, broken)
            first += len(chunk)
        if first > 1:
            wanted.check_renamed(unseen, self.name)

    def chunks(self, wanted: ColumnRules) -> Iterator[list[object]]:
        """Yield the messages, some thousand at a time."""
        entries = iter(self._messages)
        while chunk := list(islice(entries, BATCH_ROWS)):
            yield chunk

    def fingerprint(self) -> bytes:
        """Return a hash of the messages."""
        found = blake2b(digest_size=16)
        for entry in self._messages:
            row = row_of(entry) if isinstance(entry, DelayedMessage) else entry
            text = _repr(row)
            if text is None and isinstance(row, Mapping):
                text = repr({name: _repr(value) for name, value in row.items()})
            found.update((text or "?").encode(errors="backslashreplace"))
        return found.digest()

    def check_unchanged(self) -> None:
        """Nothing can change a list that the task holds."""


def _repr(value: object) -> str | None:
    try:
        return repr(value)
    except (RecursionError, ValueError):
        # nested too deep, or a whole number of too many digits: of such a field nothing is sent
        return None


class JsonLinesFiles(FileSource):
    """Files of JSON lines: an object a line, blank lines passed over; rows are numbered as lines."""

    def batches(self, wanted: ColumnRules) -> Iterator[RowBatch]:
        """Yield the rows of each file; a line that is wrong is a problem of its own."""
        unseen, some_rows = wanted.renamed(), False
        for file in self._files:
            first, size = 1, 0
            rows: list[Mapping[str, object]] = []
            broken: dict[int, tuple[str, str]] = {}
            for number, line in enumerate(iter_lines(self._fs, file), 1):
                blank = not line.strip()
                if rows and (blank or len(rows) == BATCH_ROWS or size + len(line) > _BATCH_TEXT):
                    yield batch_of(rows, file.name, first, broken)
                    rows, broken, size = [], {}, 0
                if blank:
                    continue
                if not rows:
                    first = number
                row, problem = _row_of(line, file)
                problem = problem or wanted.problem(row)
                if problem:
                    broken[len(rows)] = problem
                unseen.difference_update(row)
                some_rows = True
                rows.append(row)
                size += len(line)
            if rows:
                yield batch_of(rows, file.name, first, broken)
        if some_rows:
            wanted.check_renamed(unseen, self.name)


def _row_of(line: bytes, file: SourceFile) -> tuple[Mapping[str, object], tuple[str, str] | None]:
    try:
        text = line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        return {"line": line}, ("line", f"is not text in UTF-8: {error.reason} at byte {error.start:,}")
    try:
        row = read_json(text)
    except (ValueError, RecursionError) as error:
        return {"line": text}, ("line", f"is not JSON: {error}")
    if is_deep(text, row):
        return {"line": text}, ("line", TOO_DEEP)
    if not isinstance(row, dict):
        return {"line": text}, ("line", f"must be a JSON object, not {type(row).__name__}")
    # a field that is a number itself is one: a delay, or a part of a key
    fields = {name: float(value.text) if isinstance(value, Number) else value for name, value in row.items()}
    return {**file.partition, **fields}, None


def open_source(
    fs: Any,
    path: str,
    *,
    shown_as: str,
    source_format: str | None = None,
    require_success: bool = True,
    naive_ok: bool = False,
) -> Source:
    """Return the source for a file or folder of an fsspec file system."""

    def listing() -> list[SourceFile]:
        return list_files(fs, path, shown_as=shown_as, source_format=source_format, require_success=require_success)

    files = listing()
    if files and files[0].format == "json":
        return JsonLinesFiles(fs, listing, shown_as)
    try:
        from airflow_delayed.intake.parquet import ParquetFiles
    except ImportError:
        raise SourceError(
            "Parquet cannot be read without pyarrow: pip install 'airflow-provider-delayed[parquet]'"
        ) from None
    return ParquetFiles(fs, listing, shown_as, naive_ok=naive_ok)


class Rejects:
    """A file of rows that could not be sent: each with its own columns, and with its problem in ``rejected``.

    Once corrected, the file can be a source itself. Each try of a run writes it again; a try without rejected rows
    leaves no file. A file of another run under the path is renamed to that run's name. On a local disk only its owner
    may read it. Bytes are written as text; bytes that are not UTF-8 as ``{"base64": "..."}``.
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
        self._check_links()
        if self._local and os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
            raise self._taken("is a link or a folder")
        if not fs.exists(path):
            return
        if (other := self._run_of_file()) == run:
            fs.rm(path)
        else:
            stem, ending = posixpath.splitext(path)
            self.moved_to = f"{stem}.{_run_in_name(other)}{ending}"
            # os.replace replaces a file of the new name, and never moves the file into a folder
            (os.replace if self._local else fs.mv)(path, self.moved_to)

    def _run_of_file(self) -> str:
        try:
            with open(self.path, "rb", opener=private) if self._local else self._fs.open(self.path, "rb") as file:
                line = file.readline(_MAX_REJECTED + 1)
            if len(line) > _MAX_REJECTED:
                raise self._taken(f"is there already, and its first line has more than {_MAX_REJECTED:,} bytes")
            return str(json.loads(line)[REJECTED]["run"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            raise self._taken("is there already and holds no rejected rows") from None

    def _check_links(self) -> None:
        if self._local and (link := link_of_another_user(self.path)):
            raise self._taken(f"leads through {link}, a link that another user made where others can write")

    def _taken(self, why: str) -> InputError:
        return InputError(f"rejects={shown(self.path)} {why}; give rejects= a path of its own")

    def _new(self) -> Any:
        if not self._local:
            # many file systems cannot append
            before = self._fs.cat_file(self.path).decode() if self.count else ""
            file = self._fs.open(self.path, "wt", encoding="utf-8")
            file.write(before)
            return file
        try:
            return open(self.path, "a" if self.count else "x", encoding="utf-8", opener=private)
        except FileExistsError:
            raise self._taken("was made by somebody else meanwhile") from None

    def add(self, problem: Problem) -> None:
        """Write one row."""
        if self._file is None:
            parent = self._fs._parent(self.path)
            if parent:
                self._check_links()
                self._fs.makedirs(parent, exist_ok=True)
            self._file = self._new()
        line = {str(name): _written(value) for name, value in problem.row.items() if value is not None}
        line[REJECTED] = {"run": self.run, "place": problem.place, "column": problem.column, "problem": problem.problem}
        self._file.write(write_json(line) + "\n")
        self.count += 1

    def __enter__(self) -> Rejects:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _run_in_name(run: str) -> str:
    name = re.sub("[^A-Za-z0-9._-]", "-", run)
    if len(name) <= _MAX_RUN:
        return name
    return f"{name[:_MAX_RUN]}-{blake2b(run.encode(errors='backslashreplace'), digest_size=8).hexdigest()}"


def _written(value: object) -> object:
    try:
        plain = _plain(value)
        write_json(plain)
    except (RecursionError, ValueError):
        # only from messages=, where the value still is: JSON lines nested as deep are rejected as lines
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
    if value is None or isinstance(value, str | int | float | Number):
        return value
    return str(value)
