"""TemplatedSource: what all sources are to an operator and to Airflow's rendering."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

from airflow_delayed import lineage
from airflow_delayed.errors import InputError
from airflow_delayed.intake.sources import Source, needs_pyarrow
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
