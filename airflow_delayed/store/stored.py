"""What can be shown of a message, waiting or gone: everything but body and headers."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal

from sqlalchemy import ColumnElement, null

from airflow_delayed.message import from_microseconds, microseconds
from airflow_delayed.origin import Origin
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.states import MessageState, claimed_until, given_up, state_of

#: The columns that are read, of the tables of messages and of failed ones.
SHOWN = (
    "Id",
    "Destination",
    "Time",
    "DeliverConnId",
    "Tag",
    "ExpiresAt",
    "RetryCount",
    "StoredAt",
    "NextTry",
    "LastError",
    "ReplacedAt",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """A message that is in the store, with all its content."""

    message_id: str
    destination: str
    due_at: datetime
    state: MessageState
    #: The connection that delivers it; None: the destination is a queue table in the same database.
    deliver_conn_id: str | None
    tag: str | None
    expires_at: datetime | None
    #: How often handing it over failed.
    retry_count: int
    #: After a failure: not tried before.
    next_try: datetime | None
    #: What went wrong last; never a body or a header's value.
    last_error: str | None
    #: By the database's clock, as are the two below. What took another's place has the other's.
    stored_at: datetime | None
    #: When it was given up, or was found to have expired.
    failed_at: datetime | None
    #: When it took the place of another with its id; None: never.
    replaced_at: datetime | None = None
    #: The run of the task that stored it; None: no task did, or it is not known.
    origin: Origin | None = None

    @property
    def token(self) -> str:
        """Where a list goes on after this message: ``list(after=token)``."""
        return token_of(self.due_at, self.message_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """An id whose message is in the store no longer. No content is kept."""

    message_id: str
    #: "handed over", "cancelled", "purged" or "erased".
    state: str
    #: Since when.
    at: datetime
    #: None after an erasure, as is ``due_at``.
    destination: str | None
    due_at: datetime | None
    #: Who handed it over; None if it was cancelled, purged or erased.
    dispatcher: str | None = None


def token_of(due_at: datetime, message_id: str) -> str:
    """Return a place in the order of due time and id as a text."""
    return urlsafe_b64encode(f"{microseconds(due_at)} {message_id}".encode()).decode().rstrip("=")


def place_of(token: str) -> tuple[datetime, str]:
    """Return due time and id of a token.

    :raises ValueError: it is none.
    """
    try:
        due, _, message_id = urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode().partition(" ")
        return from_microseconds(int(due)), message_id
    except (ValueError, OverflowError):
        raise ValueError("after= is no token of a listed message; give the .token of the last one") from None


def columns(tables: Tables, where: Literal["messages", "failed"], *, held: bool = True) -> Sequence[ColumnElement[Any]]:
    """Return what is read of a row.

    :param held: False: no dispatcher can hold any of them.
    """
    table = getattr(tables, where)
    shown = [table.c[name] for name in SHOWN]
    if where == "failed":
        return [*shown, table.c.Reason, table.c.FailedAt]
    lease = claimed_until(tables) if held else null()
    return [*shown, lease.label("ClaimedUntil"), null().label("FailedAt")]


def of_runs(tables: Tables) -> Sequence[ColumnElement[Any]]:
    """Return what is read of a run."""
    return [tables.runs.c[name] for name in ("DagId", "RunId", "TaskId", "MapIndex", "Iteration")]


def stored(
    row: Sequence[Any], where: Literal["messages", "failed"], now: datetime, origin: Origin | None = None
) -> StoredMessage:
    """Return what can be shown of a row of :func:`columns` and, if it has them, :func:`of_runs`.

    :param origin: the run, if the row does not have it.
    """
    # by place, for by name takes longer than all else here
    (
        message_id,
        destination,
        due_at,
        deliver_conn_id,
        tag,
        expires_at,
        retry_count,
        stored_at,
        next_try,
        last_error,
        replaced_at,
        stands,
        failed_at,
        *of_run,
    ) = row
    if where == "failed":
        state = given_up(stands)
    else:
        timed = {"Time": due_at, "ExpiresAt": expires_at, "NextTry": next_try, "ClaimedUntil": stands}
        state = state_of(timed, now)
    return StoredMessage(
        message_id=message_id,
        destination=destination,
        due_at=due_at,
        state=state,
        deliver_conn_id=deliver_conn_id,
        tag=tag,
        expires_at=expires_at,
        retry_count=retry_count,
        next_try=next_try,
        last_error=last_error,
        stored_at=stored_at,
        failed_at=failed_at,
        replaced_at=replaced_at,
        origin=origin_of(*of_run) if of_run and of_run[0] is not None else origin,
    )


@lru_cache(maxsize=1024)
def origin_of(dag_id: str, run_id: str, task_id: str, map_index: int, iteration: int | None) -> Origin:
    """Return the run of a row of :func:`of_runs`; many messages in a list come from the same."""
    return Origin(dag_id=dag_id, run_id=run_id, task_id=task_id, map_index=map_index, iteration=iteration)
