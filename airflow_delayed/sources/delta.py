"""DeltaSource: the rows of one version of a Delta table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from typing import Any
from urllib.parse import unquote

from airflow.sdk import ObjectStoragePath

from airflow_delayed.addresses import parse, shown, without_secrets
from airflow_delayed.errors import SourceError, some
from airflow_delayed.intake.columns import check_count
from airflow_delayed.intake.files import SourceFile, check_inside, is_local
from airflow_delayed.intake.sources import Source, source_of
from airflow_delayed.intake.spool import Spool
from airflow_delayed.sources.templated import PathSource, file_system, rendered_text

#: Features of a table with which its Parquet files alone are not its rows.
_UNREADABLE = {"deletionVectors", "columnMapping"}


class DeltaSource(PathSource):
    """One version of a Delta table: the newest when the task begins to read, or a version of your choice.

    Both passes read that version, whatever is written meanwhile; a retry reads the newest one again. Needs the extra
    ``delta``. Tables with deletion vectors or column mapping are refused. Timestamps of type INT96 are what the table's
    schema calls them: ``timestamp`` is an instant, and ``timestamp_ntz`` a wall clock.

    :param path: of the table, local or a URL that both fsspec and deltalake know (``s3://conn_id@bucket/table``), as
        text, ``pathlib.Path`` or ObjectStoragePath.
    :param version: a number.
    :param storage_options: how deltalake reaches the table's log, such as ``{"AWS_REGION": "eu-west-1"}``; never shown.
        By default it goes by the worker's environment.
    """

    template_fields = ("path", "version", "storage_options")

    def __init__(
        self,
        path: str | PurePath | ObjectStoragePath,
        *,
        version: int | str | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(path)
        self.version = version
        self.storage_options = storage_options

    def open(self, spool: Spool, *, naive_ok: bool) -> Source:
        """Return the rows of the version, which is fixed here."""
        path = rendered_text("path", self.path)
        fs, root = file_system(path)
        folder = os.path.realpath(root) if is_local(fs) else None
        _check_log(fs, root, folder, shown(path))
        version, files, declared = self._read_log(path, root, folder)
        name = f"version {version} of Delta table {shown(path)}"
        listing = partial(_there, fs, root, files, name)
        return source_of(fs, listing, name, naive_ok=naive_ok, declared=declared)

    def serialize(self) -> dict[str, Any]:
        """Return path and version."""
        return {"source": "DeltaSource", "path": self.path, "version": self.version}

    def _read_log(
        self, path: str, root: str, folder: str | None
    ) -> tuple[int, list[SourceFile], dict[str, tuple[bool, str]]]:
        """Return the number of the version, its files by name, and its columns of timestamps by their types.

        :param folder: of a table of this machine its real path, in which the files must lie.
        """
        try:
            from deltalake import DeltaTable
            from deltalake.exceptions import DeltaError
        except ImportError:
            raise SourceError(
                "a Delta table cannot be read without deltalake: pip install 'airflow-provider-delayed[delta]'"
            ) from None
        options = None if self.storage_options is None else dict(self.storage_options)
        try:
            table = DeltaTable(_without_login(path, root), version=_number(self.version), storage_options=options)
        except (DeltaError, OSError) as error:
            which = "" if self.version is None else f"version {self.version} of "
            raise SourceError(
                f"{which}Delta table {shown(path)} cannot be read: {without_secrets(str(error), path)}. Is the path"
                " right, and was the version's log not cleaned up?"
            ) from error
        protocol = table.protocol()
        if found := sorted(_UNREADABLE.intersection(protocol.reader_features or ())):
            raise SourceError(
                f"Delta table {shown(path)} has {some(found, separator=' and ')}, which cannot be read here; rewrite it"
                " without (REORG TABLE ... APPLY (PURGE)), or let Spark send it (DelayedSparkSendOperator)"
            )
        fields = table.schema().fields
        check_count(len(fields), f"Delta table {shown(path)}")
        actions = table.get_add_actions(flatten=True)
        names = actions.schema.names
        columns = {name: actions.column(name).to_pylist() for name in names if name in _FILE or name.startswith(_PART)}
        rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        files = sorted((_file(row, root, folder) for row in rows), key=lambda file: file.path)
        kinds = {field.name: getattr(field.type, "type", None) for field in fields}
        declared = {
            name: (_TIMES[kind], f"{kind} in the table's schema") for name, kind in kinds.items() if kind in _TIMES
        }
        return table.version(), files, declared


#: Delta's types of timestamps, and whether they are instants.
_TIMES = {"timestamp": True, "timestamp_ntz": False}
#: The largest file of a log that is read, in bytes: some 500,000 files of the table.
MAX_LOG_FILE = 256 * 1024 * 1024
_FILE = ("path", "size_bytes", "modification_time")
_PART = "partition."


def _number(version: int | str | None) -> int | None:
    try:
        return None if version in (None, "", "None") else int(str(version))
    except ValueError:
        raise SourceError(f"version={version!r} of DeltaSource is no number") from None


def _without_login(path: str, root: str) -> str:
    """Return an address without an Airflow connection's name, which deltalake does not know."""
    address = parse(path)
    return root if address is None else f"{address.scheme}://{address.host}{address.path}"


def _file(row: Mapping[str, Any], root: str, folder: str | None) -> SourceFile:
    """Return one file of the log, which names it in percent-encoding."""
    return SourceFile(
        path=f"{root}/{unquote(row['path'])}",
        format="parquet",
        partition={
            name.removeprefix(_PART): None if value is None else str(value)
            for name, value in row.items()
            if name.startswith(_PART)
        },
        version=(str(row["size_bytes"]), str(row["modification_time"])),
        size=row["size_bytes"],
        folder=folder,
    )


def _check_log(fs: Any, root: str, folder: str | None, shown_as: str) -> None:
    """Check the files of a table's log, which deltalake opens by itself.

    :param folder: of a table of this machine its real path, in which they must lie.
    :raises SourceError: one is too large, no file, or a link that leads out of the table.
    """
    log = f"{root}/_delta_log"
    for name, info in (fs.find(log, detail=True) if fs.isdir(log) else {}).items():
        if folder is not None:
            check_inside(name, folder)
        if (size := info.get("size") or 0) > MAX_LOG_FILE:
            raise SourceError(
                f"the log of Delta table {shown_as} has a file of {size:,} bytes, and at most {MAX_LOG_FILE:,} are"
                f" read: {shown(name)}. Rewrite the table with fewer files (OPTIMIZE)"
            )


def _there(fs: Any, root: str, files: list[SourceFile], name: str) -> list[SourceFile]:
    """Return the files, which must be there.

    :raises SourceError: some were vacuumed away, or are links that lead out of the table.
    """
    found = {*fs.find(root)}
    if lost := [file.name for file in files if file.path not in found]:
        raise SourceError(
            f"{name} has lost {len(lost):,} of its {len(files):,} files: {some(lost, separator=', ')}. VACUUM removes"
            " the files of old versions; read a newer version"
        )
    for file in files:
        if file.folder is not None:
            check_inside(file.path, file.folder)
    return files
