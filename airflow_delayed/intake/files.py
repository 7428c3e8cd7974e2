"""The files of a source: a file, or a folder as Spark writes it, on any fsspec file system; read within bounds."""

from __future__ import annotations

import io
import os
import posixpath
import stat
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from airflow_delayed.addresses import shown, without_secrets
from airflow_delayed.errors import InputError, SourceError, some

_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".ndjson": "json"}
_PACKED = (".gz", ".bz2", ".xz", ".zst")
#: What Spark writes for a null in a partition's folder name.
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file with rows.

    :param partition: the columns that its folders' names hold, as in ``destination=mail/part-0.parquet``.
    :param version: changes when the file does: its size, and time or hash where the file system has them.
    :param folder: of a folder of this machine its real path, in which the file must lie.
    """

    path: str
    format: str
    partition: Mapping[str, str | None]
    version: tuple[str, ...]
    size: int | None = None
    folder: str | None = None

    @property
    def name(self) -> str:
        """The path as it may be shown: on some file systems it is a URL with a signature."""
        return shown(self.path)

    @property
    def shows_changes(self) -> bool:
        """Whether a change of its content shows: another content may have the same size."""
        return len(self.version) > 1


def list_files(
    fs: Any, path: str, *, shown_as: str, source_format: str | None = None, require_success: bool = True
) -> list[SourceFile]:
    """Return the files of a source in the order of their names. Names that begin with ``_`` or ``.`` hold no rows."""
    if not shown_as.strip():
        raise SourceError("source= is empty; did its template render to nothing?")
    root = str(fs._strip_protocol(path)).rstrip("/") or "/"
    if not fs.exists(root):
        raise SourceError(f"source {shown_as} does not exist; has the job that writes it run, and with the same path?")
    folder = None
    if fs.isdir(root):
        found = fs.find(root, detail=True)
        _check_no_table(fs, root, found, shown_as)
        if require_success and not fs.exists(posixpath.join(root, "_SUCCESS")):
            raise SourceError(
                f"source {shown_as} has no _SUCCESS file, so the job that writes it failed or is still at work; run it"
                " again. If its writer makes no such file, give source=ParquetSource(path, require_success=False)"
                " or JsonLinesSource"
            )
        folder = os.path.realpath(root) if is_local(fs) else None
    else:
        found = {root: fs.info(root)}
    files = []
    passed_over = []
    for name in sorted(found):
        # a file that is named is read whatever its name
        parts = name.removeprefix(root).strip("/").split("/")
        if found[name].get("type") == "directory":
            continue
        if any(part.startswith(("_", ".")) for part in parts):
            passed_over.append(parts)
            continue
        if folder is not None:
            check_inside(name, folder)
        elif name != root:
            _check_no_link(name, found[name])
        files.append(
            SourceFile(
                path=name,
                format=source_format or _format_of(name, shown_as),
                partition=_partition(parts[:-1]),
                version=_version(found[name]),
                size=found[name].get("size"),
                folder=folder,
            )
        )
    if not files and any(len(parts) > 1 for parts in passed_over):
        raise SourceError(f"source {shown_as} has files in folders that begin with _ or . only, which hold no rows")
    kinds = sorted({file.format for file in files})
    if len(kinds) > 1:
        raise SourceError(
            f"source {shown_as} mixes {some(kinds, separator=' and ')} files; give it a folder of one kind"
        )
    return files


def _check_no_table(fs: Any, root: str, found: Mapping[str, Any], shown_as: str) -> None:
    """Check that a folder is no table, and no part of one: a table's files have rows that were deleted or replaced."""
    kinds = (_table_with(name.removeprefix(root).strip("/").split("/")) for name in found)
    kind = next(filter(None, kinds), None)
    above = root
    # a partition's folder, or Iceberg's folder of all of them
    while kind is None and ("=" in posixpath.basename(above) or posixpath.basename(above) == "data"):
        above = posixpath.dirname(above)
        # what lies above may be forbidden
        with suppress(OSError):
            metadata = posixpath.join(above, "metadata")
            logs = [name for name in (f"{above}/_delta_log/", f"{above}/.hoodie") if fs.exists(name.rstrip("/"))]
            names = [*logs, *(fs.ls(metadata, detail=False) if fs.isdir(metadata) else [])]
            kind = next(filter(None, (_table_with(name.split("/")) for name in names)), None)
    if kind is not None:
        raise SourceError(
            f"source {shown_as} is {'' if above == root else 'a part of '}{kind} table, whose Parquet files also have"
            " rows that were deleted or replaced. Let Spark write the rows to send as Parquet into another folder"
            " (spark.read ... .write.parquet(path)) and name that, or let Spark send them (DelayedSparkSendOperator)"
        )


def _table_with(parts: list[str]) -> str | None:
    if "_delta_log" in parts[:-1]:
        return "a Delta"
    if any(part.startswith(".hoodie") for part in parts):
        return "a Hudi"
    return "an Iceberg" if parts[-2:-1] == ["metadata"] and ".metadata.json" in parts[-1] else None


def check_inside(path: str, folder: str) -> str:
    """Return a file's real path, which must lie in its source's folder."""
    real = os.path.realpath(path)
    if not real.startswith(folder.rstrip(os.sep) + os.sep):
        raise _leads_out(path)
    try:
        _check_regular(path, os.lstat(real))
    except FileNotFoundError:
        raise _no_file(path) from None
    return real


def _check_regular(path: str, found: os.stat_result) -> None:
    """Check that a path leads to a file, and to no pipe or device, which may have no end."""
    if not stat.S_ISREG(found.st_mode):
        raise _no_file(path)


def _no_file(path: str) -> SourceError:
    return SourceError(f"{shown(path)} is no file with content, or a link to nothing; remove it from the source")


def _check_no_link(path: str, info: Mapping[str, Any]) -> None:
    # where a link leads on another machine cannot be seen from here
    if info.get("islink") or info.get("type") == "link":
        raise _leads_out(path)


def _leads_out(path: str) -> SourceError:
    return SourceError(
        f"{shown(path)} is a link that leads out of the source's folder, or may do so, and so"
        " any file of this machine could be sent. Put the file itself into the folder, or give its own path as source="
    )


def _format_of(name: str, shown_as: str) -> str:
    stem = shown(name)
    for packed in _PACKED:
        stem = stem.removesuffix(packed)
    for ending, kind in _FORMATS.items():
        if stem.endswith(ending):
            return kind
    raise SourceError(
        f"source {shown_as}: {posixpath.basename(shown(name))} is neither Parquet (.parquet) nor JSON lines (.jsonl,"
        " .json); if it is, give source=ParquetSource(path) or JsonLinesSource"
    )


def _partition(folders: list[str]) -> dict[str, str | None]:
    pairs = (folder.partition("=") for folder in folders)
    return {name: None if value == _NULL_PARTITION else unquote(value) for name, equals, value in pairs if equals}


#: What fsspec's file systems call the time of a file's last change, or a hash of its content: local files, S3, GCS,
#: Azure, HDFS and WebHDFS, FTP, SFTP, SMB, HTTP, memory.
_CHANGES = (
    *("ETag", "etag", "md5Hash", "generation", "content_md5", "checksum", "sha256"),
    *("mtime", "LastModified", "last_modified", "modificationTime", "modification_time", "modified", "modify"),
    *("updated", "last_write_time", "change_time"),
)


def _version(info: Mapping[str, Any]) -> tuple[str, ...]:
    changes = tuple(str(info[key]) for key in _CHANGES if info.get(key) is not None)
    if not changes and info.get("created") is not None:
        # all that a file in memory has; for a local file it is also the time of a change of its name
        changes = (str(info["created"]),)
    return str(info.get("size")), *changes


#: Longest line, in bytes: more than any transport carries as one message.
MAX_LINE = 16 * 1024 * 1024
#: Most blank lines of a file of JSON lines, besides one for each row.
MAX_BLANK = 100_000
#: What a compressed file may unpack to: so many bytes, and beyond the first of these bounds so many times its own size.
#: Rows of JSON unpack to 5 to 30 times their size.
UNPACKED_IN_ANY_CASE = 64 * 1024 * 1024
MAX_RATIO = 200
MAX_UNPACKED = 64 * 1024 * 1024 * 1024


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
        """Compare the files with the first listing."""
        self._fs.invalidate_cache()
        if self._listing() != self._files:
            raise SourceError(
                f"source {self.name} changed after it was checked;"
                " the job that writes it must end before this task begins"
            )


@contextmanager
def opened(fs: Any, file: SourceFile) -> Iterator[Any]:
    """Open a file for its bytes, as they are stored."""
    if not is_local(fs):
        with fs.open(file.path, "rb") as handle:
            yield handle
        return
    with open(file.path, "rb", opener=at_once) as handle:
        _check_regular(file.path, os.fstat(handle.fileno()))
        if file.folder is not None:
            # the name may lead to another file than when it was listed: check the file that was opened
            real = check_inside(file.path, file.folder)
            if not os.path.samestat(os.lstat(real), os.fstat(handle.fileno())):
                raise SourceError(f"{file.name} was replaced while it was opened; run the task again")
        yield handle


@contextmanager
def unpacked(fs: Any, file: SourceFile) -> Iterator[io.BufferedReader[Any]]:
    """Open a text file for its bytes; a compressed file is unpacked on the way."""
    from fsspec.compression import compr
    from fsspec.core import get_compression

    packing = get_compression(file.path, "infer")
    try:
        with opened(fs, file) as handle:
            stream = handle if packing is None else compr[packing](handle, mode="r")
            most = _unpacked_at_most(file) if packing else None
            with io.BufferedReader(_Counted(stream, file, most), 1 << 17) as reader:
                yield reader
    except InputError:
        raise
    except Exception as error:
        # each packing has errors of its own, and fsspec knows more packings than are installed here
        raise SourceError(
            f"{file.name} cannot be read as lines of text: {without_secrets(str(error), file.path)}"
        ) from error


def iter_lines(fs: Any, file: SourceFile) -> Iterator[bytes]:
    """Yield a text file's lines with their ends."""
    number = blank = 0
    with unpacked(fs, file) as lines:
        while line := lines.readline(MAX_LINE + 1):
            number += 1
            # Windows begins files with a byte order mark, and files may have been joined
            line = line.removeprefix(BOM_UTF8)
            if len(line) > MAX_LINE:
                raise SourceError(
                    f"{file.name} row {number:,} is a line of more than {MAX_LINE:,} bytes, the longest that is"
                    " read; is the file JSON lines, with one object a line? Send a reference to a body as large"
                )
            if line.isspace():
                blank += 1
                if blank > MAX_BLANK + number - blank:
                    raise SourceError(
                        f"{file.name} has more than {MAX_BLANK:,} blank lines in its first {number:,}; is the file JSON"
                        " lines, with one object a line?"
                    )
            yield line


def _unpacked_at_most(file: SourceFile) -> int:
    if file.size is None:
        return MAX_UNPACKED
    return min(MAX_UNPACKED, max(UNPACKED_IN_ANY_CASE, MAX_RATIO * file.size))


class _Counted(io.RawIOBase):
    """A stream that ends with an error when more comes out of it than may."""

    def __init__(self, stream: Any, file: SourceFile, most: int | None) -> None:
        self._stream = stream
        self._file = file
        self._most = most
        self._count = 0

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes."""
        data = self._stream.read(len(buffer))
        self._count += len(data)
        if self._most is not None and self._count > self._most:
            raise SourceError(
                f"{self._file.name} unpacks to more than {self._most:,} bytes, the most that is unpacked from a file of"
                f" its size ({self._file.size or 0:,} bytes); unpack it before, or split it, if its content is right"
            )
        buffer[: len(data)] = data
        return len(data)


def is_local(fs: Any) -> bool:
    """Return whether a fsspec file system is that of this machine."""
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the writer of a pipe that may be there: an ``opener`` for :func:`open`."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def private(path: str, flags: int) -> int:
    """Open a file that its owner alone may read, and follow no link: an ``opener`` for :func:`open`."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o600)


#: Links on the way to one file that are followed; as many as Linux follows.
_MOST_LINKS = 40


def link_of_another_user(path: str) -> str | None:
    """Return the first link on the way to a file, itself left out, that another user may have laid; None without one.

    Links of root, of this process's user, and in folders that nobody else can write are followed: the rule of Linux's
    ``protected_symlinks``, for all folders.
    """
    trusted = {0, os.geteuid()}
    parts = os.path.dirname(os.path.abspath(path)).split(os.sep)
    folder, links = os.sep, 0
    while parts:
        part = parts.pop(0)
        if part == os.pardir:
            folder = os.path.dirname(folder)
        if part in ("", os.curdir, os.pardir):
            continue
        here = os.path.join(folder, part)
        try:
            found = os.lstat(here)
        except FileNotFoundError:
            return None
        if not stat.S_ISLNK(found.st_mode):
            folder = here
            continue
        around = os.stat(folder)
        links += 1
        shared = around.st_uid not in trusted or around.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if links > _MOST_LINKS or (shared and found.st_uid not in trusted):
            return here
        target = os.readlink(here)
        folder = os.sep if os.path.isabs(target) else folder
        parts[:0] = target.split(os.sep)
    return None
