"""Sources of rows: a list given in the DAG, Parquet files, JSON lines. Each is a stream, and can be read twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from airflow_delayed.errors import SourceError
from airflow_delayed.intake.batch import Batch, batch_of
from airflow_delayed.intake.columns import Wanted
from airflow_delayed.intake.files import SourceFile, iter_lines, list_files
from airflow_delayed.message import DelayedMessage

#: Rows in memory at a time.
BATCH_ROWS = 8192


class Source(Protocol):
    """Rows that can be read again and again."""

    name: str

    def batches(self, wanted: Wanted) -> Iterator[Batch]:
        """Yield the rows in a fixed order, in batches.

        :raises UnsupportedColumns: columns are missing, unknown or of a wrong type.
        :raises SourceError: a file cannot be read.
        """
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
        """Yield the messages; each one's fields are checked by themselves, since no two need have the same."""
        rows = iter(self._messages)
        first = 1
        while chunk := list(islice(rows, BATCH_ROWS)):
            dictionaries = [_row_of(message, f"{self.name} row {first + at:,}") for at, message in enumerate(chunk)]
            for at, row in enumerate(dictionaries):
                wanted.check(row.keys(), f"{self.name} row {first + at:,}")
            # a row is a batch of its own fields: null in one and absent in the next are the same
            yield from _alike(dictionaries, self.name, first)
            first += len(chunk)

    def check_unchanged(self) -> None:
        """Nothing can change a list that the task holds."""


def _alike(rows: Sequence[Mapping[str, object]], name: str, first: int) -> Iterator[Batch]:
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end].keys() != rows[start].keys():
            yield batch_of(rows[start:end], name, first + start)
            start = end


def _row_of(message: object, place: str) -> Mapping[str, object]:
    if isinstance(message, DelayedMessage):
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
    if isinstance(message, Mapping):
        return message
    raise SourceError(f"{place}: must be a dictionary or a DelayedMessage, not {type(message).__name__}")


class FileSource:
    """Files of one kind, and how to list them again."""

    def __init__(self, fs: Any, listing: Callable[[], list[SourceFile]], name: str) -> None:
        self.name = name
        self._fs = fs
        self._listing = listing
        self._files = listing()

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
        """Yield the rows of each file."""
        for file in self._files:
            numbered = enumerate(iter_lines(self._fs, file), 1)
            while chunk := list(islice(numbered, BATCH_ROWS)):
                run: list[dict[str, object]] = []
                first = 0
                for number, line in chunk:
                    if not line.strip():
                        continue
                    row = {**file.partition, **_object_of(line, f"{file.path} row {number:,}")}
                    if not run or row.keys() != run[0].keys() or number != first + len(run):
                        if run:
                            yield batch_of(run, file.path, first)
                        wanted.check(row.keys(), f"{file.path} row {number:,}")
                        run, first = [], number
                    run.append(row)
                if run:
                    yield batch_of(run, file.path, first)


def _object_of(line: str, place: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise SourceError(f"{place}: is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise SourceError(f"{place}: must be a JSON object, not {type(row).__name__}")
    return row


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

        for file in self._files:
            with self._fs.open(file.path, "rb") as handle:
                try:
                    parquet = pq.ParquetFile(handle)
                    names = {*parquet.schema_arrow.names, *file.partition}
                    wanted.check(names, file.path)
                    check_schema(parquet.schema_arrow, file.path, naive_ok=self._naive_ok)
                    # what is ignored is not read at all
                    used = [name for name in parquet.schema_arrow.names if wanted.uses(name)]
                    first = 1
                    for records in parquet.iter_batches(batch_size=BATCH_ROWS, columns=used):
                        yield to_batch(records, file, first)
                        first += records.num_rows
                except pa.ArrowException as error:
                    raise SourceError(f"{file.path} cannot be read as Parquet: {error}") from error


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
