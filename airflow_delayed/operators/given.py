"""What a DelayedSendOperator was given to send, as its arguments were rendered."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import XComArg
from airflow.sdk.definitions.mappedoperator import MappedOperator

from airflow_delayed.addresses import shown
from airflow_delayed.errors import InputError, SourceError
from airflow_delayed.intake.rejects import Rejects
from airflow_delayed.intake.sources import ListSource, Source, open_source
from airflow_delayed.operators.routes import origin_of
from airflow_delayed.operators.storage import file_system

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delayed.operators.send import DelayedSendOperator


def source_of(operator: DelayedSendOperator, context: Context) -> Source:
    """Return the rows of ``source``, ``messages`` or ``value``.

    :raises SourceError: they are not there, or no rows.
    """
    if operator.source is not None:
        fs, path = file_system(operator.source)
        return open_source(
            fs,
            path,
            shown_as=shown(operator.source),
            source_format=operator.source_format,
            require_success=operator.require_success,
            naive_ok=operator.timezone is not None,
        )
    if operator.messages is not None:
        messages = _rendered(operator, "messages", context)
        if isinstance(messages, str | bytes | Mapping) or not hasattr(messages, "__iter__"):
            raise SourceError(
                f"messages= must be a list of messages, not {type(messages).__name__}; if another task returns it,"
                " has that run before? In .partial() an XComArg makes no dependency"
            )
        return ListSource(list(messages))
    name = "value" if operator.value is not None else "body"
    return ListSource([{name: _rendered(operator, name, context)}], "parameters")


def _rendered(operator: DelayedSendOperator, name: str, context: Context) -> Any:
    """Render what is no template field, since it would be shown; but never what another task has returned.

    Where it was expanded from an XCom, that has taken the argument's place already, and a body is no template.
    """
    given = getattr(operator, name)
    dag = context.get("dag")
    declared = dag.get_task(operator.task_id) if dag is not None else operator
    if isinstance(declared, MappedOperator) and name not in declared.partial_kwargs and _is_xcom(declared, name):
        return given
    return operator.render_template(given, context)


def _is_xcom(mapped: MappedOperator, name: str) -> bool:
    """Return whether ``expand()`` or ``expand_kwargs()`` takes an argument from another task."""
    expanded = mapped.expand_input.value
    if isinstance(expanded, Mapping):
        return isinstance(expanded[name], XComArg)
    if isinstance(expanded, XComArg):
        return True
    return any(isinstance(each, XComArg) or isinstance(each.get(name), XComArg) for each in expanded)


def rejects_of(operator: DelayedSendOperator, context: Context) -> Rejects:
    """Return the file of ``rejects``; a map index and the iteration of a task loop come before its ending.

    :raises InputError: it lies in the source, or holds something else.
    """
    assert operator.rejects is not None
    fs, path = file_system(operator.rejects)
    if operator.source is not None:
        source = file_system(operator.source)[1].rstrip("/")
        if path == source or path.startswith(source + "/"):
            raise InputError(f"rejects={shown(operator.rejects)} lies in the source itself; give it a place of its own")
    origin = origin_of(context)
    marks = [f"-{origin.map_index}"] if origin.map_index >= 0 else []
    if origin.iteration is not None:
        marks.append(f"-iteration-{origin.iteration}")
    stem, ending = posixpath.splitext(path)
    path = stem + "".join(marks) + ending
    return Rejects(fs, path, f"{origin.dag_id}.{origin.run_id}.{origin.task_id}")
