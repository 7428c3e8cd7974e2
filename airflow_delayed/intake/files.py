"""The files of a source: a file, or a folder as Spark writes it, on any fsspec file system."""

from __future__ import annotations

import posixpath
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from airflow_delayed.errors import SourceError, some

_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".ndjson": "json"}
_PACKED = (".gz", ".bz2", ".xz", ".zst")
#: What Spark writes for a null in a partition's folder name.
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file with rows.

    :param partition: the columns that its folders' names hold, as in ``destination=mail/part-0.parquet``.
    :param version: what changes when the file does: its size, and time or hash where the file system has them.
    """

    path: str
    format: str
    partition: Mapping[str, str | None]
    version: tuple[str, ...]

    @property
    def shows_changes(self) -> bool:
        """Whether a change of its content shows: another content may have the same size."""
        return len(self.version) > 1


def list_files(
    fs: Any, path: str, *, shown_as: str, source_format: str | None = None, require_success: bool = True
) -> list[SourceFile]:
    """Return the files of a source in the order of their names. Names that begin with ``_`` or ``.`` hold no rows.

    :param source_format: "parquet" or "json" (JSON lines); by default by the file names' endings.
    :param require_success: refuse a folder without ``_SUCCESS``, whose job has not ended well.
    :raises SourceError: it is not there, not complete, or of an unknown format.
    """
    if not shown_as.strip():
        raise SourceError("source= is empty; did its template render to nothing?")
    root = str(fs._strip_protocol(path)).rstrip("/") or "/"
    if not fs.exists(root):
        raise SourceError(f"source {shown_as} does not exist; has the job that writes it run, and with the same path?")
    if fs.isdir(root):
        if require_success and not fs.exists(posixpath.join(root, "_SUCCESS")):
            raise SourceError(
                f"source {shown_as} has no _SUCCESS file, so the job that writes it failed or is still at work; run it"
                " again, or pass require_success=False if its writer makes no such file"
            )
        found = fs.find(root, detail=True)
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
        files.append(
            SourceFile(
                path=name,
                format=source_format or _format_of(name, shown_as),
                partition=_partition(parts[:-1]),
                version=_version(found[name]),
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


def _format_of(name: str, shown_as: str) -> str:
    stem = name
    for packed in _PACKED:
        stem = stem.removesuffix(packed)
    for ending, kind in _FORMATS.items():
        if stem.endswith(ending):
            return kind
    raise SourceError(
        f"source {shown_as}: {posixpath.basename(name)} is neither Parquet (.parquet) nor JSON lines (.jsonl, .json);"
        " pass source_format='parquet' or 'json' if it is"
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
        # what a file in memory has alone; of a local file it is the time of its name, too
        changes = (str(info["created"]),)
    return str(info.get("size")), *changes


def iter_lines(fs: Any, file: SourceFile) -> Iterator[str]:
    """Yield a text file's lines; packed files are unpacked on the way.

    :raises SourceError: it is torn, or not in UTF-8.
    """
    try:
        with fs.open(file.path, "rt", encoding="utf-8", compression="infer") as lines:
            yield from lines
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise SourceError(f"{file.path} cannot be read as lines of text in UTF-8: {error}") from error
