"""Headers of an operator, whose values Airflow's view of rendered templates does not show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

MASK = "***"


class MaskedHeaders(Mapping[str, str]):
    """Headers of text by text, a template, or what another task returns; rendered as those are.

    Airflow keeps rendered templates for everybody who may see the task, as :meth:`serialize` has them: names alone.
    """

    template_fields = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content

    def serialize(self) -> Any:
        """Return what may be shown."""
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


class HidesHeaders:
    """An operator whose headers may be :class:`MaskedHeaders`."""

    headers: Any

    def prepare_for_execution(self) -> Any:
        """Return Airflow's copy of the operator, whose headers are rendered by themselves."""
        made = super().prepare_for_execution()  # type: ignore[misc]
        made.headers = copy(made.headers)
        return made


def masked(headers: Any, *, show: bool) -> Any:
    """Return an operator's headers as its template field."""
    return headers if show or headers is None or isinstance(headers, MaskedHeaders) else MaskedHeaders(headers)


def headers_of(headers: Any) -> Any:
    """Return an operator's headers as they were rendered."""
    return headers.content if isinstance(headers, MaskedHeaders) else headers
