"""The files of a source: a file, or a folder as Spark writes it, on any fsspec file system."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from airflow_delayed.addresses import shown
from airflow_delayed.errors import SourceError, some
from airflow_delayed.intake.private import is_local

_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".ndjson": "json"}
_PACKED = (".gz", ".bz2", ".xz", ".zst")
#: What Spark writes for a null in a partition's folder name.
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file with rows.

    :param partition: the columns that its folders' names hold, as in ``destination=mail/part-0.parquet``.
    :param version: what changes when the file does: its size, and time or hash where the file system has them.
    :param size: in bytes, if the file system says it.
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
    """Return the files of a source in the order of their names. Names that begin with ``_`` or ``.`` hold no rows.

    :param source_format: "parquet" or "json" (JSON lines); by default by the file names' endings.
    :param require_success: refuse a folder without ``_SUCCESS``, whose job has not ended well.
    :raises SourceError: it is not there, not complete, of an unknown format, or has links that lead out of it.
    """
    if not shown_as.strip():
        raise SourceError("source= is empty; did its template render to nothing?")
    root = str(fs._strip_protocol(path)).rstrip("/") or "/"
    if not fs.exists(root):
        raise SourceError(f"source {shown_as} does not exist; has the job that writes it run, and with the same path?")
    folder = None
    if fs.isdir(root):
        if require_success and not fs.exists(posixpath.join(root, "_SUCCESS")):
            raise SourceError(
                f"source {shown_as} has no _SUCCESS file, so the job that writes it failed or is still at work; run it"
                " again, or pass require_success=False if its writer makes no such file"
            )
        found = fs.find(root, detail=True)
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


def check_inside(path: str, folder: str) -> str:
    """Return a file's real path, which must lie in its source's folder.

    :raises SourceError: a link leads out of the folder, or it is no file.
    """
    real = os.path.realpath(path)
    if not real.startswith(folder.rstrip(os.sep) + os.sep):
        raise _leads_out(path)
    if not os.path.isfile(real):
        raise SourceError(f"{shown(path)} is no file with content, or a link to nothing; remove it from the source")
    return real


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
        " .json); pass source_format='parquet' or 'json' if it is"
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
