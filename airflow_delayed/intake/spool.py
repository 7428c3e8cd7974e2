"""Spool: a file on this machine's disk for rows that cannot be read twice, those of a query or of a function.

The rows are written once, as Arrow record batches, and each pass reads them from the file. A later try of the same task
on this machine finds the file again. It is its owner's alone: it has bodies.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from airflow_delayed.errors import SourceError, SpoolError
from airflow_delayed.intake.columns import ColumnRules, RowBatch
from airflow_delayed.intake.files import private
from airflow_delayed.threads import relaxed_gc

if TYPE_CHECKING:
    from airflow_delayed.intake.produced import ProducedBatch
    from airflow_delayed.sending import Log

#: A spool that no try has used for so long is deleted: its task was killed, or went on elsewhere.
KEPT = timedelta(days=7)
#: The ending of a spool that is being written. Its writer has locked it; the lock ends with the process.
_PART = ".part"
_DIGEST = 16
_LENGTH = 8


#: Runs the query or the function, and yields its rows: dictionaries or DelayedMessage.
Produce = Callable[[ColumnRules], Iterable[object]]


def folder_of_user(folder: Path) -> Path:
    """Return the folder that this process's user has in a folder of spools."""
    return folder / f"airflow-delayed-spool-{os.getuid()}"


def spools_with(folder: Path, texts: Collection[str]) -> Iterator[Path]:
    """Yield the user's whole spools that have one of these texts anywhere, maybe as a part of a longer text.

    Whoever deletes one lets a later try produce its rows again; a try that reads it now reads on.

    :raises OSError: a file cannot be read.
    """
    # Arrow writes a text as its UTF-8
    wanted = re.compile(b"|".join(re.escape(text.encode()) for text in texts))
    for path in sorted(folder_of_user(folder).glob("*.rows")):
        with suppress(FileNotFoundError), open(path, "rb", opener=private) as file:
            if os.fstat(file.fileno()).st_size and wanted.search(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)):
                yield path


class Spool:
    """The spooled rows of one task's try.

    :param folder: of spools; one of its user's own is made in it.
    :param task: identifies the task's run, and its turn until it is cleared.
    :param limit: bytes that a file may have.
    :param reuse: whether a file of an earlier try, or of this one before it was deferred, holds the rows.
    """

    def __init__(self, folder: Path, task: bytes, *, limit: int, reuse: bool, log: Log) -> None:
        self.log = log
        self._folder = folder_of_user(folder)
        self._task = task
        self._limit = limit
        self._reuse = reuse
        self._files: dict[Path, BufferedReader] = {}

    def open(self, name: str, content: bytes, produce: Produce, wanted: ColumnRules) -> BufferedReader:
        """Return the file of some rows, which are produced if it is not there.

        :param name: of the source.
        :param content: identifies the query, or the function's arguments.
        :raises SourceError: there are more bytes than the limit.
        :raises SpoolError: the disk is full, or the folder cannot be used.
        """
        key = blake2b(self._task, digest_size=_DIGEST)
        key.update(repr((name, content, wanted)).encode())
        path = self._folder / f"{key.hexdigest()}.rows"
        if path not in self._files:
            with self._disk(name):
                self._make_folder()
                found = self._found(path, name) if self._reuse else None
            if found is None:
                from airflow_delayed.intake.produced import produced

                found = self._write(path, name, produced(produce(wanted), wanted))
            self._files[path] = found
        return self._files[path]

    def close(self) -> None:
        """Close the files, and keep them for a later try."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def delete(self) -> None:
        """Close the files and delete them."""
        paths = list(self._files)
        self.close()
        for path in paths:
            path.unlink(missing_ok=True)

    @contextmanager
    def _disk(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SpoolError(name, str(self._folder), error.strerror or str(error)) from error

    def _make_folder(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError("it is not a folder that its user alone may enter")
        for file in self._folder.iterdir():
            # another task may delete it meanwhile
            with suppress(FileNotFoundError):
                if file.stat().st_mtime < time.time() - KEPT.total_seconds():
                    file.unlink()
                elif file.suffix == _PART:
                    _delete_abandoned(file)

    def _found(self, path: Path, name: str) -> BufferedReader | None:
        try:
            file = os.fdopen(private(str(path), os.O_RDONLY), "rb")
        except FileNotFoundError:
            self.log.warning(
                "no rows of an earlier try are on this machine: %s runs again, and what it gives now is sent. Rows that"
                " are as they were have the same ids; id_columns= names a message whatever else changes",
                name,
            )
            return None
        if not _is_whole(file):
            file.close()
            self.log.warning("the rows of %s that an earlier try left are damaged; it runs again", name)
            return None
        os.utime(path)
        self.log.info("%s does not run again: its rows are those that were spooled before", name)
        return file

    def _check_limit(self, name: str, rows: int, written: int) -> None:
        if written > self._limit:
            raise SourceError(
                f"{name} gives more than the {self._limit:,} bytes that [delayed] spool_limit allows in one spool"
                f" ({rows:,} rows so far). Nothing was sent. Raise the option if the disk of {self._folder} has the"
                " room, or select fewer rows in a run"
            )

    def _write(self, path: Path, name: str, batches: Iterator[ProducedBatch]) -> BufferedReader:
        began, rows, written = time.monotonic(), 0, 0
        digest = blake2b(digest_size=_DIGEST)
        with self._disk(name):
            handle, made = _locked_part(self._folder)
        try:
            with relaxed_gc():
                for batch in batches:
                    data = _packed(batch)
                    rows += batch.records.num_rows
                    written += len(data)
                    self._check_limit(name, rows, written)
                    digest.update(data)
                    with self._disk(name):
                        _write_all(handle, data)
            with self._disk(name):
                _write_all(handle, digest.digest())
                os.replace(made, path)
        except BaseException:
            os.close(handle)
            os.unlink(made)
            raise
        took = time.monotonic() - began
        self.log.info("%s gave %s rows, spooled as %s bytes in %.1f s", name, f"{rows:,}", f"{written:,}", took)
        return open(handle, "rb")


def _locked_part(folder: Path) -> tuple[int, str]:
    """Make a file for a spool and lock it, so that no other process takes it for the rest of a killed task."""
    while True:
        handle, made = tempfile.mkstemp(suffix=_PART, dir=folder)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # another process has found it before it was locked, and deletes it
            os.close(handle)
            continue
        except OSError:
            # a file system without locks: there nobody deletes it before KEPT is over
            return handle, made
        if os.fstat(handle).st_nlink:
            return handle, made
        os.close(handle)


def _delete_abandoned(part: Path) -> None:
    """Delete a spool whose writer was killed; a spool that is being written stays."""
    with suppress(OSError), open(part, "r+b", opener=private) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.unlink()


def _write_all(handle: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]


class SpooledSource:
    """Rows that are produced once and read from their spool again and again.

    :param name: of the source.
    :param content: identifies the query, or the function's arguments.
    """

    def __init__(self, name: str, content: bytes, produce: Produce, spool: Spool) -> None:
        self.name = name
        self._content = content
        self._produce = produce
        self._spool = spool
        self._fingerprint: bytes | None = None

    def batches(self, wanted: ColumnRules) -> Iterator[RowBatch]:
        """Yield the rows as the source gave them; the first call produces them."""
        file = self._spool.open(self.name, self._content, self._produce, wanted)
        self._fingerprint = _end(file)[1]
        for data in _packages(file):
            yield _unpacked(data, self.name)

    def fingerprint(self) -> bytes | None:
        """Return a hash of the rows; they must have been read."""
        return self._fingerprint

    def check_unchanged(self) -> None:
        """Nothing changes a file that this process holds open."""


def _packed(batch: ProducedBatch) -> bytes:
    """Return a batch as bytes: their number in 8 bytes, then a stream of Arrow's IPC format with one batch.

    Each batch has a schema of its own, since values decide the types of columns.
    """
    import pyarrow as pa

    about = {"first_row": batch.first_row, "broken": list(batch.broken.items())}
    schema = batch.records.schema.with_metadata({"airflow_delayed": json.dumps(about)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(batch.records.replace_schema_metadata(schema.metadata))
    data: bytes = sink.getvalue().to_pybytes()
    return len(data).to_bytes(_LENGTH, "big") + data


def _unpacked(data: bytes, name: str) -> RowBatch:
    import pyarrow as pa

    from airflow_delayed.intake.arrow import ArrowColumns

    with pa.ipc.open_stream(data) as reader:
        records = reader.read_next_batch()
    about: dict[str, Any] = json.loads(records.schema.metadata[b"airflow_delayed"])
    return RowBatch(
        columns=ArrowColumns(records, {}),
        size=records.num_rows,
        origin=name,
        first_row=about["first_row"],
        broken={index: (column, problem) for index, (column, problem) in about["broken"]},
        records=records,
    )


def _end(file: BinaryIO) -> tuple[int, bytes]:
    """Return where the digest of the rows begins, and the digest."""
    end = max(0, file.seek(0, os.SEEK_END) - _DIGEST)
    file.seek(end)
    return end, file.read(_DIGEST)


def _packages(file: BinaryIO) -> Iterator[bytes]:
    end, place = _end(file)[0], 0
    while place < end:
        # another pass may have read in between
        file.seek(place)
        size = int.from_bytes(file.read(_LENGTH), "big")
        yield file.read(size)
        place += _LENGTH + size


def _is_whole(file: BinaryIO) -> bool:
    """Return whether the rows have their digest; after a crash of the machine a file may have lost its end."""
    left, digest = _end(file)
    found = blake2b(digest_size=_DIGEST)
    file.seek(0)
    while left and (block := file.read(min(left, 1 << 20))):
        found.update(block)
        left -= len(block)
    return found.digest() == digest
