"""Which criteria of a filter were passed. None is no default here: what was passed and is None is an error.

A None comes from a template that rendered to nothing, from another task, or from a null in a mapped task's row. Taken
for a criterion that was not passed, it would select the messages of everybody else too.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

from airflow_delayed.errors import NullCriterion


class Unset(Enum):
    """The type of the default of a parameter that was not passed."""

    UNSET = "not passed"

    def __repr__(self) -> str:
        return self.name


UNSET: Final = Unset.UNSET


def passed(**parameters: object) -> dict[str, Any]:
    """Return the parameters that are not :data:`UNSET`."""
    for name, value in parameters.items():
        if value is None:
            raise NullCriterion(name)
    return {name: value for name, value in parameters.items() if value is not UNSET}


def one_of(**parameters: object) -> None:
    """Check that one of two parameters was given, the other is None."""
    if list(parameters.values()).count(None) != 1:
        raise ValueError(f"give {'= or '.join(parameters)}=, and not both")
