"""TemplatedSource: what all sources are to an operator and to Airflow's rendering; and the sources of files.

Beside them the file systems of paths and URLs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from os.path import abspath
from pathlib import PurePath
from typing import Any, ClassVar, cast

from airflow.sdk import ObjectStoragePath

from airflow_delayed import lineage
from airflow_delayed.addresses import secrets_of, shown, without_secrets
from airflow_delayed.errors import InputError, SourceError
from airflow_delayed.intake.columns import check_renames
from airflow_delayed.intake.sources import Source, open_source
from airflow_delayed.intake.spool import Spool


class TemplatedSource(ABC):
    """Rows as a DAG names them. Its ``template_fields`` are rendered with those of its operator."""

    template_fields: ClassVar[Sequence[str]] = ()
    #: See ``columns`` of DelayedSendOperator.
    columns: Mapping[str, str] | None = None

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
    :param columns: as DelayedSendOperator's.
    """

    #: "parquet" or "json", whatever the files' endings are.
    source_format: ClassVar[str]

    def __init__(
        self,
        path: str | PurePath | ObjectStoragePath,
        *,
        require_success: bool = True,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(path)
        check_renames(columns)
        self.require_success = require_success
        self.columns = columns

    def open(self, spool: Spool, *, naive_ok: bool) -> Source:
        """Return the rows of the files."""
        path = rendered_text("path", self.path)
        return open_files(
            path, source_format=self.source_format, require_success=self.require_success, naive_ok=naive_ok
        )


class ParquetSource(FilesSource):
    """Parquet files, as Spark writes them; folders named ``column=value`` add that column.

    Timestamps of type INT96 are instants if the schema that Spark, Iceberg or pandas leaves in the file calls them so.
    Files of a source must agree on that.
    """

    source_format = "parquet"


class JsonLinesSource(FilesSource):
    """Files of JSON lines: an object a line."""

    source_format = "json"


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


def open_files(url: str, *, source_format: str | None = None, require_success: bool = True, naive_ok: bool) -> Source:
    """Return the rows of a file or folder.

    :param source_format: "parquet" or "json"; None: by the files' endings.

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
