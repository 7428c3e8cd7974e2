"""Sources of rows: a list given in the DAG, Parquet files, JSON lines. Each is a stream, and can be read twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, Protocol

from airflow_delayed.addresses import without_secrets
from airflow_delayed.errors import SourceError
from airflow_delayed.intake.batch import Batch, batch_of, row_of
from airflow_delayed.intake.columns import Wanted
from airflow_delayed.intake.files import SourceFile, list_files
from airflow_delayed.intake.lines import iter_lines, opened
from airflow_delayed.intake.rows import TOO_DEEP, is_deep
from airflow_delayed.message import DelayedMessage

#: Rows in memory at a time,
BATCH_ROWS = 8192
#: and bytes of them. JSON as Python's objects takes several times the text.
BATCH_BYTES = 64 * 1024 * 1024
_BATCH_TEXT = BATCH_BYTES // 4


class Source(Protocol):
    """Rows that can be read again and again."""

    name: str

    def batches(self, wanted: Wanted) -> Iterator[Batch]:
        """Yield the rows in a fixed order, in batches.

        :raises UnsupportedColumns: columns are missing, unknown or of a wrong type.
        :raises SourceError: a file cannot be read.
        """
        ...

    def fingerprint(self) -> bytes | None:
        """Return what changes when the rows do; it may also change when they do not. None: changes do not show."""
        ...

    def check_unchanged(self) -> None:
        """Check that the rows are those that were read before.

        :raises SourceError: files came, went or changed.
        """
        ...


class ListSource:
    """Messages given as dictionaries (or as DelayedMessage), numbered from 1."""

    def __init__(self, messages: Sequence[object], name: str = "messages") -> None:
        self.name = name
        self._messages = messages

    def batches(self, wanted: Wanted) -> Iterator[Batch]:
        """Yield the messages; a field that is wrong is a problem of its own row, since no two need have the same."""
        entries = iter(self._messages)
        first = 1
        while chunk := list(islice(entries, BATCH_ROWS)):
            rows, broken = [], {}
            for index, entry in enumerate(chunk):
                row = row_of(entry) if isinstance(entry, DelayedMessage) else entry
                if isinstance(row, Mapping):
                    problem = wanted.problem(row)
                else:
                    kind = type(row).__name__
                    row, problem = {}, ("message", f"must be a dictionary or a DelayedMessage, not {kind}")
                rows.append(row)
                if problem:
                    broken[index] = problem
            yield batch_of(rows, self.name, first, broken)
            first += len(chunk)

    def fingerprint(self) -> bytes:
        """Return a hash of all that the messages say."""
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


class FileSource:
    """Files of one kind, and how to list them again."""

    def __init__(self, fs: Any, listing: Callable[[], list[SourceFile]], name: str) -> None:
        self.name = name
        self._fs = fs
        self._listing = listing
        self._files = listing()

    def fingerprint(self) -> bytes | None:
        """Return names, sizes, and times or hashes of the files; None where a file has neither time nor hash."""
        if not all(file.shows_changes for file in self._files):
            return None
        return repr([(file.path, file.version) for file in self._files]).encode()

    def check_unchanged(self) -> None:
        """Compare the files with those that were listed first."""
        self._fs.invalidate_cache()
        if self._listing() != self._files:
            raise SourceError(
                f"source {self.name} changed after it was checked;"
                " the job that writes it must end before this task begins"
            )


class JsonLinesSource(FileSource):
    """Files of JSON lines: an object a line, blank lines passed over; rows are numbered as lines."""

    def batches(self, wanted: Wanted) -> Iterator[Batch]:
        """Yield the rows of each file; a line that is wrong is a problem of its own."""
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
                rows.append(row)
                size += len(line)
            if rows:
                yield batch_of(rows, file.name, first, broken)


def _row_of(line: bytes, file: SourceFile) -> tuple[Mapping[str, object], tuple[str, str] | None]:
    try:
        text = line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        return {"line": line}, ("line", f"is not text in UTF-8: {error.reason} at byte {error.start:,}")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {"line": text}, ("line", f"is not JSON: {error}")
    if is_deep(text, row):
        return {"line": text}, ("line", TOO_DEEP)
    if not isinstance(row, dict):
        return {"line": text}, ("line", f"must be a JSON object, not {type(row).__name__}")
    return {**file.partition, **row}, None


class ParquetSource(FileSource):
    """Parquet files, as Spark writes them.

    :param naive_ok: a time zone is given for timestamps that have none.
    """

    def __init__(self, fs: Any, listing: Callable[[], list[SourceFile]], name: str, *, naive_ok: bool = False) -> None:
        super().__init__(fs, listing, name)
        self._naive_ok = naive_ok

    def batches(self, wanted: Wanted) -> Iterator[Batch]:
        """Yield the rows of each file, whose columns' types are checked first."""
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise SourceError(
                "reading Parquet needs pyarrow: pip install 'airflow-provider-delayed[parquet]'"
            ) from None
        from airflow_delayed.intake.arrow import check_schema, to_batch
        from airflow_delayed.intake.decoded import check_growth, joined, pieces, rows_within

        for file in self._files:
            try:
                with opened(self._fs, file) as handle:
                    # Spark's INT96 as nanoseconds would wrap around in the year 2262
                    parquet = pq.ParquetFile(handle, coerce_int96_timestamp_unit="us")
                    names = {*parquet.schema_arrow.names, *file.partition}
                    wanted.check(names, file.name)
                    check_schema(parquet.schema_arrow, file.name, naive_ok=self._naive_ok)
                    # what is ignored is not read at all
                    used = [name for name in parquet.schema_arrow.names if wanted.uses(name)]
                    first = 1
                    # of all row groups at once pyarrow would hold the whole file
                    for group in range(parquet.num_row_groups):
                        check_growth(file, parquet.metadata, group, used)
                        rows = min(BATCH_ROWS, rows_within(BATCH_BYTES, parquet.metadata, group, used, handle))
                        batches = parquet.iter_batches(rows, row_groups=[group], columns=used)
                        for records in joined(batches, BATCH_ROWS, BATCH_BYTES):
                            for piece in pieces(records, BATCH_BYTES):
                                yield to_batch(piece, file, first)
                                first += piece.num_rows
            except (pa.ArrowException, OSError, EOFError) as error:
                text = without_secrets(str(error), file.path)
                raise SourceError(f"{file.name} cannot be read as Parquet: {text}") from error


def open_source(
    fs: Any,
    path: str,
    *,
    shown_as: str,
    source_format: str | None = None,
    require_success: bool = True,
    naive_ok: bool = False,
) -> Source:
    """Return the source for a file or folder of an fsspec file system.

    :raises SourceError: it is not there, not complete, or of an unknown format.
    """

    def listing() -> list[SourceFile]:
        return list_files(fs, path, shown_as=shown_as, source_format=source_format, require_success=require_success)

    files = listing()
    if files and files[0].format == "json":
        return JsonLinesSource(fs, listing, shown_as)
    return ParquetSource(fs, listing, shown_as, naive_ok=naive_ok)
