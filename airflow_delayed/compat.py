"""Differences between Airflow 3.1, 3.2, 3.3 and 3.4.

A feature that the installed Airflow lacks raises :class:`NeedsAirflow`, when the DAG is parsed if possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    AirflowSensorTimeout,
    AirflowSkipException,
    TaskDeferred,
    conf,
)
from airflow.sdk import __version__ as _sdk
from airflow.sdk import timezone

from airflow_delayed.delivery import Finding, State

__all__ = [
    "CLEAR_DELETES_STATE",
    "KEEPS_STATE",
    "RENDERS_TRIGGERS",
    "AirflowException",
    "AirflowFailException",
    "AirflowSensorTimeout",
    "AirflowSkipException",
    "KeepsTexts",
    "NeedsAirflow",
    "TaskDeferred",
    "TryStates",
    "conf",
    "core_timetable",
    "data_interval",
    "extra_of",
    "limits",
    "never_expire",
    "stats",
]

#: Extras without content.
_EMPTY = ("", "{}", "null")
_VERSION = tuple(map(int, _sdk.split(".")[:2]))
#: Whether a task can keep something from one try to the next. The Task SDK's 1.3 is Airflow's 3.3.
KEEPS_STATE = _VERSION >= (1, 3)
#: Whether the triggerer renders the templates of a task that starts from its trigger.
RENDERS_TRIGGERS = _VERSION >= (1, 3)
#: Whether a clear deletes what a task has kept, unless its user chooses otherwise; so it is from Airflow 3.4 on.
CLEAR_DELETES_STATE = _VERSION >= (1, 4)


class NeedsAirflow(ValueError):
    """A feature needs a later Airflow."""

    def __init__(self, what: str, version: str, why: str) -> None:
        super().__init__(f"{what} needs Airflow {version} or later, {why}")


def limits() -> Iterator[Finding]:
    """Yield a warning for each promise that this package cannot keep on the installed Airflow."""
    sdk = f"Airflow with Task SDK {_sdk}"
    if not KEEPS_STATE:
        yield Finding(
            state=State.WARNING,
            resource=sdk,
            found="it keeps no state of a task between two tries",
            code="version",
            why="a task that is tried again sends all from the top with the same ids, and refuses relative delays"
            " unless it has delay_from= or a store; Airflow 3.3 keeps it",
        )
    elif never_expire() is None:
        yield Finding(
            state=State.WARNING,
            resource=sdk,
            found="it has no airflow.sdk.NEVER_EXPIRE",
            code="version",
            why="the start of a task that is cleared after [state_store] default_retention_days is forgotten; please"
            " report this release of Airflow to airflow-provider-delayed",
        )


def never_expire() -> Any:
    """Return the retention of what a task keeps for good; None before Airflow 3.3."""
    try:
        # from Airflow 3.4 on this loads DAGs, Jinja and more, which a short command does without
        from airflow.sdk import NEVER_EXPIRE  # type: ignore[attr-defined]
    except ImportError:
        return None
    return NEVER_EXPIRE


class TryStates(dict[str, Any]):
    """A replacement of Airflow's task state store that keeps values for one try."""

    def set(self, key: str, value: Any, **options: object) -> None:
        """Keep a value."""
        self[key] = value

    def delete(self, key: str) -> None:
        """Delete a value."""
        self.pop(key, None)


def core_timetable(dag: Any) -> Any:
    """Return the timetable of a DAG as the scheduler has it, which computes the times of runs."""
    try:
        from airflow.serialization.encoders import coerce_to_core_timetable
    except ImportError:
        # Airflow 3.1, where a DAG's file has the scheduler's
        return dag.timetable
    return coerce_to_core_timetable(dag.timetable)


def data_interval(dag: Any, logical_date: datetime) -> tuple[datetime, datetime]:
    """Return the beginning and the end of the data interval of a manual run."""
    interval = core_timetable(dag).infer_manual_data_interval(run_after=timezone.coerce_datetime(logical_date))
    return interval.start, interval.end


def extra_of(connection: Any) -> dict[str, Any]:
    """Return the extra of Airflow's connection.

    :raises ValueError: it is no JSON object. Airflow takes an unreadable one for an empty one, and that would be
        a connection without TLS.
    """
    extra = connection.extra_dejson
    if not isinstance(extra, dict) or (connection.extra and not extra and connection.extra.strip() not in _EMPTY):
        raise ValueError(f"connection {connection.conn_id!r}: the extra is no JSON object")
    return extra


def stats() -> Any:
    """Return Airflow's metrics, an object with ``incr``, ``timing`` and ``gauge``."""
    found: Any
    try:
        from airflow.sdk.observability import stats as found
    except ImportError:
        # Airflow 3.1
        from airflow.stats import Stats as found  # noqa: N813
    return found


class KeepsTexts:
    """A base before Airflow's own, with which a text stays one in a DAG that renders native types.

    Jinja makes a number, a list or a dictionary of a text that looks like it: an id,
    a tag or a body would be another. An expression whose value is no text stays what it is.
    """

    def render_template(self, content: Any, context: Any, jinja_env: Any = None, seen_oids: Any = None) -> Any:
        """Render a text, or all texts of a collection."""
        from jinja2.nativetypes import NativeEnvironment

        env = jinja_env or self.get_template_env()  # type: ignore[attr-defined]
        if not isinstance(content, str) or not isinstance(env, NativeEnvironment):
            return super().render_template(content, context, env, seen_oids)  # type: ignore[misc]
        is_file = content.endswith(tuple(self.template_ext))  # type: ignore[attr-defined]
        pieces = list((env.get_template if is_file else env.from_string)(content).generate(context))
        if len(pieces) == 1 and not isinstance(pieces[0], str):
            return pieces[0]
        text = "".join(map(str, pieces))
        # Jinja writes the value of an expression without a name: {{ none }}
        return None if text == "None" != content else text
