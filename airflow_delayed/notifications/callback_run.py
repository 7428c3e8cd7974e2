"""The run that a callback is about, by the context that Airflow calls it with; the tags and ids of its messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow_delayed.identity import key_id
from airflow_delayed.message import parse_moment, utcnow


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackRun:
    """A run of a DAG, and the failure in it.

    :param started_at: when the run last started: a clear starts it again. None: Airflow did not pass it.
    :param failure: names the failure among all failures of the run. A callback that Airflow calls twice for one
        failure gets the same name, and a run that was cleared and fails again another.
    :param failed_at: when that failure began.
    """

    dag_id: str
    run_id: str
    started_at: datetime | None
    failure: str
    failed_at: datetime

    @classmethod
    def of(cls, context: Mapping[str, Any]) -> CallbackRun:
        """Return the run of a context: of a DAG's callback, a task's, or a DeadlineAlert's.

        - A deadline is named by its id, and failed when it passed.
        - A run that has ended is named by its end: Airflow sets that once, before it calls the DAG's callback, and
          again when a cleared run ends.
        - A task of a run that goes on is named by the id of its try.
        - A DAG's callback without a task has neither run nor try in its context (a run that timed out, for one):
          the failure begins at this moment.
        """
        run, ti = context.get("dag_run"), context.get("ti")
        ended, deadline = _moment(run, "end_date"), context.get("deadline")
        if deadline is not None:
            failed_at = parse_moment("deadline_time", deadline["deadline_time"])
            failure = f"deadline {deadline['id']}"
        elif ended is not None:
            failed_at, failure = ended, f"end {ended.isoformat()}"
        else:
            failed_at = _moment(ti, "end_date") or utcnow()
            failure = f"moment {failed_at.isoformat()}" if ti is None else f"try {ti.id}"
        return cls(
            dag_id=_field(run, "dag_id") or context["dag"].dag_id,
            # a deadline's run is as the REST API shows it
            run_id=_field(run, "dag_run_id") or _field(run, "run_id") or context["run_id"],
            started_at=_moment(run, "start_date"),
            failure=failure,
            failed_at=failed_at,
        )

    def tag(self, per: str) -> str:
        """Return the tag of the messages of all runs of the DAG, or of this run alone.

        :param per: "dag" or "run".
        """
        from airflow_delayed.store.schema import MAX_TAG

        # no name of a DAG has a slash
        tag = f"notifier:{self.dag_id}" if per == "dag" else f"notifier:{self.dag_id}/{self.run_id}"
        return tag if len(tag) <= MAX_TAG else f"{tag[:200]}#{key_id(('tag',), (tag,))}"

    def __str__(self) -> str:
        return f"DAG {self.dag_id}, run {self.run_id}"


def ids_of(tag: str) -> str:
    """Return how the ids of all messages with a tag begin."""
    return f"{key_id(('tag',), (tag,))[:16]}-"


def _field(run: Any, name: str) -> Any:
    return run.get(name) if isinstance(run, Mapping) else getattr(run, name, None)


def _moment(run: Any, name: str) -> datetime | None:
    value = _field(run, name)
    return None if value is None else parse_moment(name, value)
