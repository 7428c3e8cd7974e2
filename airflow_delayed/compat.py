"""What differs between Airflow 3.1, 3.2, 3.3 and 3.4.

What an earlier one does not have is refused when the DAG is parsed, or where it shows, by :class:`NeedsAirflow`.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import __version__ as _sdk

try:
    from airflow.sdk.configuration import conf
    from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException, TaskDeferred
except ImportError:
    # Airflow 3.1
    from airflow.configuration import conf
    from airflow.exceptions import (  # type: ignore[attr-defined, no-redef]
        AirflowException,
        AirflowFailException,
        AirflowSkipException,
        TaskDeferred,
    )
try:
    # it is published there by name, and imported lazily
    from airflow.sdk import NEVER_EXPIRE  # type: ignore[attr-defined]
except ImportError:
    # Airflow 3.2
    NEVER_EXPIRE = None

__all__ = [
    "CLEAR_DELETES_STATE",
    "KEEPS_STATE",
    "NEVER_EXPIRE",
    "AirflowException",
    "AirflowFailException",
    "AirflowSkipException",
    "NeedsAirflow",
    "TaskDeferred",
    "TryStates",
    "conf",
    "stats",
]

#: Whether a task can keep something from one try to the next. The Task SDK's 1.3 is Airflow's 3.3.
KEEPS_STATE = tuple(map(int, _sdk.split(".")[:2])) >= (1, 3)
#: Whether a clear deletes what a task has kept, unless its user chooses otherwise; so it is from Airflow 3.4 on.
CLEAR_DELETES_STATE = tuple(map(int, _sdk.split(".")[:2])) >= (1, 4)


class NeedsAirflow(ValueError):
    """Something needs a later Airflow.

    :param why: with what to do instead.
    """

    def __init__(self, what: str, version: str, why: str) -> None:
        super().__init__(f"{what} needs Airflow {version} or later, {why}")


class TryStates(dict[str, Any]):
    """In place of Airflow's task state store: keeps things for one try."""

    def set(self, key: str, value: Any, **options: object) -> None:
        """Keep something."""
        self[key] = value

    def delete(self, key: str) -> None:
        """Forget it."""
        self.pop(key, None)


def stats() -> Any:
    """Return Airflow's metrics: what has ``incr``, ``timing`` and ``gauge``."""
    found: Any
    try:
        from airflow.sdk.observability import stats as found
    except ImportError:
        # Airflow 3.1
        from airflow.stats import Stats as found  # noqa: N813
    return found
