"""The run that a callback is about: by the context that Airflow calls it with, or by its fields. Its tags and links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote
from uuid import UUID

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.fields import MAX_TAG
from airflow_delayed.identity import NOTIFIER, Origin, key_id
from airflow_delayed.message import EPOCH, from_microseconds, parse_moment, utcnow

if TYPE_CHECKING:
    from airflow_delayed.store.api import RunAttempt, RunFailure

#: What a failure and the success that ends it have in common.
Per = Literal["run", "dag", "task"]
#: Airflow's type of the runs that a DAG's schedule makes; the ids of such runs begin with it.
SCHEDULED = "scheduled"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackRun:
    """A run of a DAG, or a task instance in it, that has failed or succeeded.

    :param started_at: when the run last started: a clear starts it again. None: Airflow did not pass it.
    :param ended_at: when it ended; None: it goes on.
    :param failure: names the failure among all failures of the run. A callback that Airflow calls twice for one
        failure gets the same name, and a run that was cleared and fails again another.
    :param failed_at: when that failure began.
    :param reason: Airflow's word for it.
    :param task_id: the task that failed last, or whose callback this is; None: Airflow did not pass it.
    :param try_id: identifies the try of the task.
    :param task_started_at: when the try began; None: unknown.
    """

    dag_id: str
    run_id: str
    run_type: str | None = None
    run_after: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    failure: str
    failed_at: datetime
    reason: str | None = None
    task_id: str | None = None
    map_index: int = -1
    try_number: int | None = None
    try_id: str | None = None
    task_started_at: datetime | None = None
    task_ended_at: datetime | None = None

    @classmethod
    def of(cls, context: Mapping[str, Any]) -> CallbackRun:
        """Return the run of a context: of a DAG's callback, a task's, or a DeadlineAlert's.

        - A deadline is named by its id, and failed when it passed.
        - A run that has ended is named by its end: Airflow sets that once, before it calls the DAG's callback, and
          again when a cleared run ends.
        - A task of a run that goes on is named by the id of its try.
        - Otherwise (a DAG's callback without a task) the failure begins at this moment, and no other has its name.

        A failure without the start of its run counts as later than any success, but a deadline as earlier.
        """
        run, ti, deadline = context.get("dag_run"), context.get("ti"), context.get("deadline")
        # a deadline's run is as the REST API shows it
        run_id = _field(run, "dag_run_id") or _field(run, "run_id") or context["run_id"]
        started_at, ended_at = moment_of(run, "start_date"), moment_of(run, "end_date")
        try_id, task_ended_at = None if ti is None else str(ti.id), moment_of(ti, "end_date")
        reason = context.get("reason")
        if deadline is not None:
            failed_at = parse_moment("deadline_time", deadline["deadline_time"])
            # Airflow deletes the deadlines of a run that succeeds: a deadline of a run that had not begun passed before
            # any success
            started_at = started_at or EPOCH
            failure, reason = f"deadline {deadline['id']}", "deadline"
        elif ended_at is not None:
            failed_at, failure = ended_at, f"end {ended_at.isoformat()}"
        else:
            failed_at = task_ended_at or utcnow()
            failure = f"moment {failed_at.isoformat()}" if try_id is None else f"try {try_id}"
        of_id = _scheduled_by_id(run_id)
        kind = _field(run, "run_type") or (None if of_id is None else SCHEDULED)
        map_index = _field(ti, "map_index")
        return cls(
            dag_id=_field(run, "dag_id") or context["dag"].dag_id,
            run_id=run_id,
            run_type=None if kind is None else str(getattr(kind, "value", kind)),
            run_after=moment_of(run, "run_after") or of_id,
            started_at=started_at,
            ended_at=ended_at,
            failure=failure,
            failed_at=failed_at,
            reason=reason,
            task_id=_field(ti, "task_id"),
            map_index=-1 if map_index is None else map_index,
            try_number=_field(ti, "try_number"),
            try_id=try_id,
            task_started_at=_began(try_id, moment_of(ti, "start_date")),
            task_ended_at=task_ended_at,
        )

    def attempt(self, per: Per, key: str | None = None) -> RunAttempt:
        """Return the attempt that failed or succeeded, with the tag of its messages.

        :param per: "run": each run is red by itself; "dag": so are all scheduled runs of the DAG together, of which
            later ones replace the earlier, and each other run by itself; "task": each task instance by itself.
        :param key: narrows it.
        """
        from airflow_delayed.store.api import RunAttempt

        task = (self.task_id, str(self.map_index)) if per == "task" and self.task_id is not None else ()
        own, name = (tag_of(self.dag_id, one, self.run_id, *task) for one in (key, None))
        replaced = per == "dag" and self.run_type == SCHEDULED and self.run_after is not None
        return RunAttempt(
            name=name,
            run_id=self.run_id,
            tag=tag_of(self.dag_id, key) if replaced else own,
            # of a failure whose run Airflow did not pass, or whose key could not be rendered; and of a scheduled run
            # that a backfill has made its own
            other_tags=(own, name, tag_of(self.dag_id, key)) if per == "dag" else (own, name),
            started_at=self.task_started_at if task else self.started_at,
            run_after=self.run_after if replaced else None,
            ended_at=self.task_ended_at if task else self.ended_at,
        )

    def failure_of(self, per: Per) -> str:
        """Return the name of the failure: of a task by itself, that of its try."""
        return f"try {self.try_id}" if per == "task" and self.try_id is not None else self.failure

    def described(self, attempt: RunAttempt, base_url: str, problem: str | None = None) -> RunFailure:
        """Return the failure as the message has it.

        :param base_url: Airflow's ``[api] base_url``; empty: no links.
        :param problem: why the message is not as its author wrote it.
        """
        from airflow_delayed.store.api import RunFailure

        run_url = log_url = None
        if base_url:
            run_url = f"{base_url.rstrip('/')}/dags/{_part(self.dag_id)}/runs/{_part(self.run_id)}"
            if self.task_id is not None:
                mapped = f"/mapped/{self.map_index}" if self.map_index >= 0 else ""
                of_try = f"?try_number={self.try_number}" if self.try_number else ""
                log_url = f"{run_url}/tasks/{_part(self.task_id)}{mapped}{of_try}"
        return RunFailure(
            dag_id=self.dag_id,
            run_id=self.run_id,
            task_id=self.task_id,
            map_index=self.map_index if self.map_index >= 0 else None,
            failed_at=self.failed_at,
            started_at=attempt.started_at,
            run_after=attempt.run_after,
            reason=self.reason,
            run_url=run_url,
            log_url=log_url,
            problem=problem,
        )

    @property
    def origin(self) -> Origin:
        """The run, by which the page finds the message."""
        return Origin(dag_id=self.dag_id, run_id=self.run_id, task_id=self.task_id or "", map_index=self.map_index)

    def __str__(self) -> str:
        return f"DAG {self.dag_id}, run {self.run_id}"


def tag_of(dag_id: str, key: str | None, *parts: str, begins: str = NOTIFIER) -> str:
    """Return the tag of the messages about a DAG, narrowed by a key, a run of it, or a task instance."""
    # no name of a DAG has an at sign or a slash
    of_dag = f"{begins}{dag_id}" + ("" if key is None else f"@{_escaped(key)}")
    tag = "/".join([of_dag, *map(_escaped, parts)])
    return tag if len(tag) <= MAX_TAG else f"{tag[:200]}#{key_id(('tag',), (tag,))}"


def ids_of(tag: str) -> str:
    """Return how the ids of all messages with a tag begin."""
    return f"{key_id(('tag',), (tag,))[:16]}-"


def _escaped(name: str) -> str:
    """Return a name without a slash, so that different names never make the same tag."""
    return name.replace("%", "%25").replace("/", "%2F")


def _part(name: str) -> str:
    return quote(name, safe="")


def _scheduled_by_id(run_id: str) -> datetime | None:
    """Return the ``run_after`` that the id of a scheduled run has, as Airflow's own timetables make it."""
    kind, _, moment = run_id.partition("__")
    try:
        return parse_moment("run_id", moment) if kind == SCHEDULED else None
    except InvalidMessage:
        return None


def _began(try_id: str | None, start_date: datetime | None) -> datetime | None:
    """Return when a try of a task began: by its id, in which Airflow's server has written the time.

    The start date is by the worker's clock, and the workers of two tries have two. It also is missing where the worker
    was lost.
    """
    try:
        number = UUID(try_id or "")
    except ValueError:
        return start_date
    # UUID version 7: 48 bits of milliseconds since 1970
    return from_microseconds((number.int >> 80) * 1000) if number.version == 7 else start_date


def _field(run: Any, name: str) -> Any:
    return run.get(name) if isinstance(run, Mapping) else getattr(run, name, None)


def moment_of(run: Any, name: str) -> datetime | None:
    """Return a time of a run or a task instance; None: it has none."""
    value = _field(run, name)
    return None if value is None else parse_moment(name, value)
