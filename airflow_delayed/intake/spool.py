"""Spool: a file on this machine's disk for the rows of a query or a function.

So a retry on this machine reads the rows of the first try. They are written once, and each pass reads them from the
file. It is its user's alone: it has bodies, and is read with pickle.
"""

from __future__ import annotations

import os
import pickle
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_delayed.errors import SourceError, SpoolError
from airflow_delayed.intake.columns import BATCH_BYTES, BATCH_ROWS, ColumnRules, row_of
from airflow_delayed.intake.files import private
from airflow_delayed.intake.sources import ListSource
from airflow_delayed.message import DelayedMessage

if TYPE_CHECKING:
    from airflow_delayed.sending import Log

#: A spool that no try has used for so long is deleted: its task was killed, or went on elsewhere.
KEPT = timedelta(days=7)
#: Bytes of rows in memory at a time: as Python's objects they take several times the file.
_CHUNK_BYTES = BATCH_BYTES // 8

#: Runs the query or the function, and yields its rows: dictionaries or DelayedMessage.
Produce = Callable[[ColumnRules], Iterable[object]]


class Spool:
    """The spooled rows of one task's try; with ``reuse`` a file of an earlier try holds the rows."""

    def __init__(self, folder: str, task: bytes, *, reuse: bool, check_count: Callable[[int], None], log: Log) -> None:
        self._folder = Path(folder) / f"airflow-delayed-spool-{os.getuid()}"
        self._task = task
        self._reuse = reuse
        self._check_count = check_count
        self._log = log
        self._files: set[Path] = set()

    def file(self, name: str, content: bytes, rows: Iterable[object]) -> Path:
        """Return the file of some rows, which are produced if it is not there; ``content`` identifies the query."""
        path = self._folder / f"{blake2b(repr((self._task, name, content)).encode(), digest_size=16).hexdigest()}.rows"
        if path in self._files:
            return path
        with self._disk(name):
            self._make_folder()
            found = self._reuse and path.exists()
            if found:
                os.utime(path)
        if found:
            self._log.info("%s does not run again: its rows were spooled before", name)
        else:
            if self._reuse:
                self._log.warning(
                    "no rows of an earlier try are on this machine: %s runs again, and what it gives now is sent. Rows"
                    " that are as they were have the same ids; id_columns= names a message whatever else changes",
                    name,
                )
            self._write(path, name, rows)
        self._files.add(path)
        return path

    def delete(self) -> None:
        """Delete the files."""
        for path in self._files:
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

    def _write(self, path: Path, name: str, rows: Iterable[object]) -> None:
        began, count = time.monotonic(), 0
        part = path.with_suffix(f".{os.getpid()}.part")
        with ExitStack() as closing:
            with self._disk(name):
                file = closing.enter_context(open(part, "wb", opener=private))
            closing.callback(part.unlink, missing_ok=True)
            for count, row in enumerate(rows, 1):
                self._check_count(count)
                try:
                    data = pickle.dumps(row_of(row) if isinstance(row, DelayedMessage) else row)
                except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
                    raise SourceError(f"{name} row {count:,} cannot be written to disk: {error}") from None
                try:
                    file.write(data)
                except OSError as error:
                    raise SpoolError(name, str(self._folder), error.strerror or str(error)) from error
            with self._disk(name):
                file.flush()
                # a crash of the machine must not leave a whole file with half of the rows
                os.fsync(file.fileno())
                size = file.tell()
                os.replace(part, path)
        took = time.monotonic() - began
        self._log.info("%s gave %s rows, spooled as %s bytes in %.1f s", name, f"{count:,}", f"{size:,}", took)


class SpooledSource(ListSource):
    """Rows that are produced once and read from their spool again and again."""

    def __init__(self, name: str, content: bytes, produce: Produce, spool: Spool) -> None:
        super().__init__((), name)
        self._content = content
        self._produce = produce
        self._spool = spool
        self._path: Path | None = None

    def chunks(self, wanted: ColumnRules) -> Iterator[list[Any]]:
        """Yield the rows as the source gave them; the first call produces them."""
        self._path = self._spool.file(self.name, self._content, self._produce(wanted))
        with open(self._path, "rb", opener=private) as file:
            size = os.fstat(file.fileno()).st_size
            while (start := file.tell()) < size:
                chunk: list[Any] = []
                while file.tell() < min(size, start + _CHUNK_BYTES) and len(chunk) < BATCH_ROWS:
                    chunk.append(pickle.load(file))  # noqa: S301 - its user alone can write it
                yield chunk

    def fingerprint(self) -> bytes:
        """Return a hash of the rows; they must have been read."""
        assert self._path is not None
        found = blake2b(digest_size=16)
        with open(self._path, "rb", opener=private) as file:
            while block := file.read(1 << 20):
                found.update(block)
        return found.digest()
