"""The reports of a Spark job: counts, files of attempts, log lines and the manifest. Never a body or a header's value.

Spark gives the driver the result of the attempt that succeeded, and of no other. Where executors and driver share a
folder, each attempt keeps a file there, which it rewrites every ten seconds and when it fails; the file of an attempt
that is killed has its last counts.

Arrow is imported where it is used: Airflow reads a DAG's operators without it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from airflow_delayed.errors import SourceError
from airflow_delayed.reports import MOST_DESTINATIONS, Counts, SendReport, by_size, largest_destinations
from airflow_delayed.sending import Log
from airflow_delayed.spark.options import Settings


def logger() -> logging.Logger:
    """Return the logger ``airflow_delayed.spark``; without a handler it writes to standard error."""
    log = logging.getLogger("airflow_delayed.spark")
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        # Spark copies that to the driver's or the executor's own log
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
    return log


@dataclass(slots=True, kw_only=True)
class PartitionCounts(Counts):
    """Counts of one attempt at one partition, or of many."""

    rows: int = 0
    #: Rows past due that were not sent.
    skipped: int = 0
    sent: SendReport = field(default_factory=SendReport)
    stored: SendReport = field(default_factory=SendReport)

    @property
    def out(self) -> int:
        """Messages that were sent or stored."""
        return self.sent.sent + self.stored.sent + self.stored.replaced

    def summary(self) -> dict[str, Any]:
        """Return what DelayedSendOperator returns as well, and ``rows``."""
        both = self.sent + self.stored
        return {
            "rows": self.rows,
            "sent": self.sent.sent,
            "stored": self.stored.sent,
            "replaced": self.stored.replaced,
            "not_replaced": self.stored.not_replaced,
            "duplicates": both.duplicates,
            "skipped": self.skipped,
            "first_due": both.first_due.isoformat() if both.first_due else None,
            "last_due": both.last_due.isoformat() if both.last_due else None,
        }

    def by_destination(self) -> dict[str, int]:
        """Messages that were sent or stored, by destination, most first."""
        return by_size((self.sent + self.stored).by_destination)


def total(counts: Iterable[PartitionCounts]) -> PartitionCounts:
    """Add counts up."""
    found = PartitionCounts()
    for each in counts:
        found.merge(each)
    return found


#: Seconds between two files of an attempt.
EVERY = 10.0


class AttemptFile:
    """The file of one attempt."""

    def __init__(self, folder: SharedFolder, name: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._file = folder.child(f"{name}.json")
        self._monotonic = monotonic
        self._next: float | None = None

    def progress(self, counts: PartitionCounts) -> None:
        """Write the counts if the file is older than ten seconds."""
        now = self._monotonic()
        if self._next is None or now >= self._next:
            self._next = now + EVERY
            self._write(counts, failed=False)

    def failed(self, counts: PartitionCounts) -> None:
        """Write the counts of an attempt that ends without success."""
        self._write(counts, failed=True)

    def _write(self, counts: PartitionCounts, *, failed: bool) -> None:
        self._file.write({"failed": failed, **counts.to_json()})


class NoAttemptFile:
    """In place of the file, where no folder is shared."""

    def progress(self, counts: PartitionCounts) -> None:
        """Do nothing."""

    def failed(self, counts: PartitionCounts) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class FailedAttempts:
    """The counts of attempts without success.

    :param attempts: how many of them left a file.
    :param exact: each wrote its file when it failed; otherwise one was killed, and may have sent more than it counted.
    """

    attempts: int
    counts: PartitionCounts
    exact: bool


def failed_attempts(folder: SharedFolder, successful: Collection[str]) -> FailedAttempts:
    """Read the files of all attempts but the successful ones."""
    found = []
    for file in folder.children():
        if file.url.rpartition("/")[2].removesuffix(".json") not in successful:
            found.append(file.read())
    return FailedAttempts(len(found), total(map(PartitionCounts.from_json, found)), all(one["failed"] for one in found))


def log_commit(
    log: Log, settings: Settings, done: Sequence[tuple[int, PartitionCounts]], failed: FailedAttempts | None
) -> None:
    """Log the counts of a job that succeeded."""
    counts = total(one for _, one in done)
    what = "dry run, so nothing was sent; there would be" if settings.dry_run else "all confirmed:"
    log.info(
        "%s %s sent by connection %s and %s stored, of %s rows; %s were there already, %s replaced, %s came too late to"
        " replace, %s past due and skipped",
        what,
        f"{counts.sent.sent:,}",
        settings.deliver,
        f"{counts.stored.sent:,}",
        f"{counts.rows:,}",
        f"{counts.sent.duplicates + counts.stored.duplicates:,}",
        f"{counts.stored.replaced:,}",
        f"{counts.stored.not_replaced:,}",
        f"{counts.skipped:,}",
    )
    _destinations(log, counts)
    again = sum(1 for earlier, _ in done if earlier)
    if again and not settings.dry_run:
        log.warning("%s partitions succeeded only after another attempt at them. %s", f"{again:,}", _twice(failed))
    elif failed is not None and failed.attempts:
        log.warning("there was more than one attempt at some partitions. %s", _twice(failed))


def log_abort(
    log: Log, settings: Settings, done: Sequence[PartitionCounts], partitions: int, failed: FailedAttempts | None
) -> None:
    """Log the messages of a failed job that cannot be recalled."""
    if settings.dry_run:
        return
    counts = total(done)
    _destinations(log, counts)
    log.warning(
        "the job failed. %s of %s partitions had been sent in full: %s messages by connection %s, which cannot be"
        " recalled, and %s in the store, where they can be cancelled. %s. The same job again means the same messages"
        " if it is given the same anchor and scope, or its rows have ids",
        f"{len(done):,}",
        f"{partitions:,}",
        f"{counts.sent.sent:,}",
        settings.deliver,
        f"{counts.stored.sent + counts.stored.replaced:,}",
        _others(failed),
    )


def _destinations(log: Log, counts: PartitionCounts) -> None:
    by_destination = counts.by_destination()
    for name, count in list(by_destination.items())[:MOST_DESTINATIONS]:
        log.info("%s: %s", name, f"{count:,}")
    if len(by_destination) > MOST_DESTINATIONS:
        log.info("and %s other destinations", f"{len(by_destination) - MOST_DESTINATIONS:,}")


def _twice(failed: FailedAttempts | None) -> str:
    return f"{_others(failed)}. A broker's consumers get that once more, with the same ids; a store has nothing twice"


def _others(failed: FailedAttempts | None) -> str:
    if failed is None:
        return (
            "Their own errors say what other attempts had sent, not known where they were killed: the"
            " option attempts names a folder for it"
        )
    if not failed.attempts:
        return "No other attempt reported a sent message; a killed attempt may have sent some before it reported"
    least = "" if failed.exact else "at least "
    named = ", ".join(
        f"{count:,} to {name}" for name, count in list(failed.counts.by_destination().items())[:MOST_DESTINATIONS]
    )
    return (
        f"{failed.attempts:,} other attempts had sent {least}{failed.counts.sent.sent:,} messages and stored"
        f" {least}{failed.counts.stored.sent + failed.counts.stored.replaced:,}{f' ({named})' if named else ''}"
    )


#: Raised when the meaning of a field changes.
VERSION = 1


def manifest_of(
    settings: Settings, done: Sequence[tuple[int, PartitionCounts]], failed: FailedAttempts | None
) -> dict[str, Any]:
    """Return the content of the file.

    ``version``, ``anchor``, ``partitions``, how many of them were ``repeated``, ``summary``, ``destinations`` (and
    ``other_destinations``); ``other_attempts`` with the number of failed attempts, their counts of sent and stored
    messages, and whether these are ``exact``; None where no folder was shared.
    """
    counts, anchor = total(one for _, one in done), settings.rules.anchor
    summary = counts.summary()
    if settings.dry_run:
        summary["dry_run"] = True
    return {
        "version": VERSION,
        "anchor": None if anchor is None else anchor.isoformat(),
        "partitions": len(done),
        "repeated": sum(1 for earlier, _ in done if earlier),
        "summary": summary,
        **largest_destinations(counts.by_destination()),
        "other_attempts": None
        if failed is None
        else {
            "attempts": failed.attempts,
            "sent": failed.counts.sent.sent,
            "stored": failed.counts.stored.sent + failed.counts.stored.replaced,
            "exact": failed.exact,
        },
    }


def check_manifest(given: Any, place: str) -> Mapping[str, Any]:
    """Return a manifest that was read."""
    if not isinstance(given, dict) or given.get("version") != VERSION or not isinstance(given.get("summary"), dict):
        raise SourceError(
            f"{place} is no manifest of this release: Spark's machines and Airflow's need the same release of"
            " airflow-provider-delayed"
        )
    return given


class SharedFolder:
    """A small file or a folder that executors and the driver share: a local path, or a URL that Arrow or fsspec opens.

    :raises SourceError: nothing opens a URL of that scheme.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._path = _open_folder(url)

    def write(self, content: Any) -> None:
        """Replace a file of JSON in one step: a reader finds the whole old file or the whole new one."""
        text = json.dumps(content).encode()
        if not self._local:
            # an object store shows an object when it is complete
            with self._fs.open_output_stream(self._path) as stream:
                stream.write(text)
            return
        self._fs.create_dir(self._path.rpartition("/")[0] or "/", recursive=True)
        unfinished = f"{self._path}.{uuid4().hex[:8]}.unfinished"
        with self._made(unfinished) as stream:
            stream.write(text)
        self._fs.move(unfinished, self._path)

    def _made(self, path: str) -> Any:
        from pyarrow.fs import LocalFileSystem

        # a new file: a link that somebody laid there is an error
        return open(path, "xb") if isinstance(self._fs, LocalFileSystem) else self._fs.open_output_stream(path)

    def read(self) -> Any:
        """Read a file of JSON."""
        with self._fs.open_input_stream(self._path) as stream:
            return json.loads(stream.read())

    def child(self, name: str) -> SharedFolder:
        """Return a file or folder in this folder."""
        made = SharedFolder.__new__(SharedFolder)
        made.url, made._fs, made._path = f"{self.url.rstrip('/')}/{name}", self._fs, f"{self._path.rstrip('/')}/{name}"
        return made

    def children(self) -> list[SharedFolder]:
        """Return the JSON files in this folder; none if it is not there."""
        from pyarrow.fs import FileSelector, FileType

        found = self._fs.get_file_info(FileSelector(self._path, allow_not_found=True))
        names = sorted(info.base_name for info in found if info.type == FileType.File)
        return [self.child(name) for name in names if name.endswith(".json")]

    def remove(self) -> None:
        """Remove this folder, if it is there."""
        from pyarrow.fs import FileType

        if self._fs.get_file_info(self._path).type == FileType.Directory:
            self._fs.delete_dir(self._path)

    @property
    def _local(self) -> bool:
        from pyarrow.fs import LocalFileSystem

        # a move within HDFS is as good; there and elsewhere that Arrow knows, only object stores cannot move
        return isinstance(self._fs, LocalFileSystem) or self._fs.type_name == "hdfs"


def _open_folder(url: str) -> tuple[Any, str]:
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem

    if "://" not in url:
        return LocalFileSystem(), url
    # Hadoop calls the scheme s3a, Arrow s3
    plain = url.replace("s3a://", "s3://", 1)
    try:
        fs, path = FileSystem.from_uri(plain)
    except ArrowInvalid as problem:
        try:
            from fsspec.core import url_to_fs

            other, path = url_to_fs(url)
        except (ImportError, ValueError):
            scheme = url.partition("://")[0]
            raise SourceError(f"{scheme}:// cannot be opened: {problem}; install the fsspec package for it") from None
        return PyFileSystem(FSSpecHandler(other)), path
    return fs, path
