"""Arguments of an operator whose values Airflow's view of rendered templates does not show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

from airflow.sdk import XComArg
from airflow.sdk.definitions.mappedoperator import MappedOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

MASK = "***"


class MaskedHeaders(Mapping[str, str]):
    """An operator's headers: a mapping of text, a template, or the result of another task. They are rendered as usual.

    Airflow shows rendered templates to everybody who may see the task, as :meth:`serialize` returns them: names alone.
    """

    template_fields = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content

    def serialize(self) -> Any:
        """Return the names without the values."""
        if isinstance(self.content, Mapping):
            return {str(name): MASK for name in self.content}
        return MASK

    def __str__(self) -> str:
        return str(self.serialize())

    __repr__ = __str__

    def __getitem__(self, name: str) -> str:
        value: str = self.content[name]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


class HidesArguments:
    """A part of an operator whose headers may be :class:`MaskedHeaders`, and whose messages are no template fields."""

    headers: Any
    source: Any
    task_id: str

    def prepare_for_execution(self) -> Any:
        """Return Airflow's copy of the operator, whose headers and source are rendered by themselves."""
        made = super().prepare_for_execution()  # type: ignore[misc]
        made.headers = copy(made.headers)
        made.source = copy(made.source)
        return made

    def render_hidden(self, context: Context, name: str) -> Any:
        """Render an argument that is no template field, since the UI would show it.

        The result of another task is never rendered: a body is no template. In a mapped task that was expanded from
        an XCom, that result has taken the argument's place already.
        """
        value = getattr(self, name)
        dag = context.get("dag")
        declared = dag.get_task(self.task_id) if dag is not None else self
        if isinstance(declared, MappedOperator) and name not in declared.partial_kwargs and _is_xcom(declared, name):
            return value
        return self.render_template(value, context)  # type: ignore[attr-defined]


def _is_xcom(mapped: MappedOperator, name: str) -> bool:
    """Return whether ``expand()`` or ``expand_kwargs()`` takes an argument from another task."""
    expanded = mapped.expand_input.value
    if isinstance(expanded, Mapping):
        return isinstance(expanded[name], XComArg)
    if isinstance(expanded, XComArg):
        return True
    return any(isinstance(each, XComArg) or isinstance(each.get(name), XComArg) for each in expanded)


def masked(headers: Any) -> Any:
    """Return an operator's headers as its template field."""
    return headers if headers is None or isinstance(headers, MaskedHeaders) else MaskedHeaders(headers)


def headers_of(headers: Any) -> Any:
    """Return an operator's headers as they were rendered."""
    return headers.content if isinstance(headers, MaskedHeaders) else headers
