"""TemplatedSource: what all sources are to an operator and to Airflow's rendering; and the sources of files.

Those are files of a format and Delta tables, and the file systems of their paths and URLs.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from os.path import abspath
from pathlib import PurePath
from typing import Any, ClassVar, cast
from urllib.parse import unquote

from airflow.sdk import ObjectStoragePath

from airflow_delayed import lineage
from airflow_delayed.addresses import parse, secrets_of, shown, without_secrets
from airflow_delayed.errors import InputError, SourceError, some
from airflow_delayed.intake.columns import check_count
from airflow_delayed.intake.files import SourceFile, check_inside, is_local
from airflow_delayed.intake.sources import Source, needs_pyarrow, open_source, source_of
from airflow_delayed.intake.spool import Spool


class TemplatedSource(ABC):
    """Rows as a DAG names them. Its ``template_fields`` are rendered with those of its operator."""

    template_fields: ClassVar[Sequence[str]] = ()
    #: Endings of files that a field may name in place of its text.
    template_ext: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def open(self, spool: Spool, *, naive_ok: bool) -> Source:
        """Return the rows, which can be read again and again.

        :param spool: takes rows that cannot be read twice.
        :param naive_ok: there is a time zone for times without an offset.
        :raises SourceError: they are not there, or a field is wrong.
        """

    def serialize(self) -> dict[str, Any]:
        """Return what Airflow shows of it among the rendered templates."""
        return {"source": type(self).__name__, **{name: getattr(self, name) for name in self.template_fields}}

    def __repr__(self) -> str:
        """Return what Airflow keeps of a mapped task's source: the same each time that the DAG is parsed."""
        return str(self.serialize())

    def inputs(self) -> list[lineage.Dataset]:
        """Return what is read, by OpenLineage's names."""
        return []

    @property
    def folder(self) -> str | None:
        """The path or URL of the files, if it is files."""
        return None


def require_pyarrow(what: str) -> None:
    """Check that what is spooled can be written.

    :raises SourceError: pyarrow is not installed.
    """
    if find_spec("pyarrow") is None:
        raise needs_pyarrow(what)


def rendered_flag(name: str, value: object) -> bool:
    """Return a parameter that is true or false, as its template was rendered.

    :raises InputError: it is neither.
    """
    text = str(value).strip().lower()
    if text not in ("true", "false"):
        raise InputError(f"{name}={value!r} is neither true nor false")
    return text == "true"


def rendered_text(name: str, value: object) -> str:
    """Return a text as its template was rendered; a number, as native rendering makes it, as text.

    :raises InputError: a template rendered to nothing, or to something that is no text.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise InputError(f"{name}= is a {type(value).__name__}, and must be text; what does its template render to?")
    if value.strip() in ("", "None"):
        raise InputError(f"{name}= is {value!r}; did its template render to nothing?")
    return value


class PathSource(TemplatedSource):
    """Rows at a path.

    :param path: local or a URL (``s3://conn_id@bucket/key``), as text, ``pathlib.Path`` or ObjectStoragePath.
    """

    template_fields: ClassVar[Sequence[str]] = ("path",)

    def __init__(self, path: str | PurePath | ObjectStoragePath) -> None:
        self.path = path

    @property
    def path(self) -> Any:
        """The path or URL as text, or a task's result that will be one."""
        return self._path

    @path.setter
    def path(self, path: object) -> None:
        # Airflow sets it too, when it has rendered it
        self._path = path_text(path)

    def inputs(self) -> list[lineage.Dataset]:
        """Return the file or folder."""
        return [lineage.file(self.path)]

    @property
    def folder(self) -> str | None:
        """The path or URL."""
        return cast(str, self.path)


class FilesSource(PathSource):
    """A file or a folder of one format, local or by any fsspec URL.

    :param path: ``s3://conn_id@bucket/key``; as text, ``pathlib.Path`` or ObjectStoragePath.
    :param require_success: refuse a folder without ``_SUCCESS``.
    """

    #: As the operator's ``source_format=`` has it.
    source_format: ClassVar[str]

    def __init__(self, path: str | PurePath | ObjectStoragePath, *, require_success: bool = True) -> None:
        super().__init__(path)
        self.require_success = require_success

    def open(self, spool: Spool, *, naive_ok: bool) -> Source:
        """Return the rows of the files."""
        path = rendered_text("path", self.path)
        return open_files(path, self.source_format, require_success=self.require_success, naive_ok=naive_ok)


class ParquetSource(FilesSource):
    """Parquet files, as Spark writes them; folders named ``column=value`` add that column.

    Timestamps of type INT96 are instants if the schema that Spark, Iceberg or pandas leaves in the file calls them so.
    Files of a source must agree on that.
    """

    source_format = "parquet"


class JsonLinesSource(FilesSource):
    """Files of JSON lines: an object a line."""

    source_format = "json"


class CsvSource(FilesSource):
    """Files of comma-separated values in UTF-8, whose first line names the columns (RFC 4180).

    An empty field is null, and ``""`` an empty text. ``headers`` are a JSON object, ``delay_seconds`` and
    ``spread_seconds`` numbers and times ISO 8601; all else is text, the values of ``id_columns`` too.
    """

    source_format = "csv"


def path_text(path: Any) -> Any:
    """Return a path or an ObjectStoragePath as text, with its connection; anything else, such as an XComArg, as it is.

    :raises SourceError: it has options of a file system, which text has no place for.
    """
    if not isinstance(path, PurePath | ObjectStoragePath):
        return path
    if options := getattr(path, "storage_options", None):
        raise SourceError(
            f"the {type(path).__name__} has {', '.join(sorted(options))}= for its file system, which a source does not"
            " take; put them into an Airflow connection and name that: ObjectStoragePath('s3://bucket/key',"
            " conn_id='...')"
        )
    return str(path)


def open_files(url: str, source_format: str | None, *, require_success: bool, naive_ok: bool) -> Source:
    """Return the rows of a file or folder.

    :raises SourceError: it is not there, not complete, or of an unknown format.
    """
    fs, path = file_system(url)
    return open_source(
        fs,
        path,
        shown_as=shown(url),
        source_format=source_format,
        require_success=require_success,
        naive_ok=naive_ok,
    )


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system and the path in it of a local path, an ObjectStoragePath URL or any fsspec URL.

    :raises SourceError: no file system of that scheme is installed.
    """
    from airflow.sdk.log import mask_secret

    # what other packages log or raise of it is masked in this task's log
    for secret in secrets_of(url):
        mask_secret(secret)
    if "://" not in url:
        import fsspec

        # ".." and the like would hide which files lie in a folder
        return fsspec.filesystem("file"), abspath(url) if url.strip() else url
    try:
        path = ObjectStoragePath(url)
        return path.fs, abspath(path.path) if path.protocol == "file" else path.path
    except (ValueError, ImportError, NotImplementedError) as error:
        problem = error
    from fsspec.core import url_to_fs

    try:
        fs, inside = url_to_fs(url)
    except (ValueError, ImportError):
        raise SourceError(
            f"{shown(url)} cannot be opened: {without_secrets(str(problem), url)}; install the provider or the fsspec"
            " package for it"
        ) from None
    return fs, inside


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
