"""The runs of tasks that messages come from: the table ``_runs``. A message's row has only the number of its run."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import Connection, Select, delete, exists, insert, or_, select, update

from airflow_delayed.origin import Origin, SentBy
from airflow_delayed.store import claims
from airflow_delayed.store.schema import Tables, value_of

#: A run that has nothing in the store any more is kept at least so long after it last began to store.
KEPT = timedelta(days=7)
#: How many at most are forgotten in one transaction.
FORGOTTEN = 100


def register(connection: Connection, tables: Tables, origin: Origin) -> int:
    """Return the number of a run, noting it if it is new. To be committed before its messages are stored.

    :raises sqlalchemy.exc.IntegrityError: another transaction has noted it just now; to be done anew.
    """
    runs, now = tables.runs, claims.database_time(connection)
    row = connection.execute(select(runs.c.Seq, runs.c.At).where(runs.c.Digest == origin.digest)).one_or_none()
    if row is not None:
        # so that nobody forgets it before its messages are there
        if now - row.At > KEPT / 7:
            again = update(runs).where(runs.c.Seq == row.Seq).values(At=now)
            if not connection.execute(again).rowcount:
                return _note(connection, tables, origin, now)
        return int(row.Seq)
    return _note(connection, tables, origin, now)


def _note(connection: Connection, tables: Tables, origin: Origin, now: datetime) -> int:
    row = {
        "DagId": origin.dag_id,
        "RunId": origin.run_id,
        "TaskId": origin.task_id,
        "MapIndex": origin.map_index,
        "Iteration": origin.iteration,
        "Digest": origin.digest,
        "At": now,
    }
    key = connection.execute(insert(tables.runs).values(row)).inserted_primary_key
    assert key is not None
    return int(key[0])


def anchor(connection: Connection, tables: Tables, origin: Origin, turn: str | None) -> datetime | None:
    """Return what a run's relative delays count from, as its first try has left it; None if it is not known."""
    runs = tables.runs
    kept = select(runs.c.Anchor, runs.c.Turn).where(runs.c.Digest == origin.digest)
    row = connection.execute(kept).one_or_none()
    return row.Anchor if row is not None and row.Turn == turn else None


def keep_anchor(connection: Connection, tables: Tables, origin: Origin, turn: str | None, anchor: datetime) -> None:
    """Keep what a run's relative delays count from, in place of what was kept before.

    :param turn: where each clear of the task means other messages, what its tries have in common until the next clear.
    :raises sqlalchemy.exc.IntegrityError: another transaction has noted the run just now; to be done anew.
    """
    runs, number = tables.runs, register(connection, tables, origin)
    connection.execute(update(runs).where(runs.c.Seq == number).values(Turn=turn, Anchor=anchor))


def forget_old(connection: Connection, tables: Tables, before: datetime, now: datetime) -> int:
    """Forget up to 100 runs that began to store before a time and have nothing left; return how many were looked at.

    Runs with messages left are checked again after :data:`KEPT`, or later.
    """
    runs = tables.runs
    old = runs.c.At < min(before, now - KEPT)
    numbers = list(connection.execute(select(runs.c.Seq).where(old).order_by(runs.c.At).limit(FORGOTTEN)).scalars())
    if numbers:
        left = [exists().where(table.c.Run == runs.c.Seq) for table in (tables.messages, tables.failed)]
        used = set(connection.execute(select(runs.c.Seq).where(runs.c.Seq.in_(numbers), or_(*left))).scalars())
        connection.execute(update(runs).where(runs.c.Seq.in_(sorted(used))).values(At=now))
        # one that begins to store again at this moment is not old any more
        gone = [number for number in numbers if number not in used]
        connection.execute(delete(runs).where(runs.c.Seq.in_(sorted(gone)), old))
    return len(numbers)


def meant(tables: Tables, sent_by: SentBy) -> Select[tuple[int]]:
    """Return the query for the numbers of runs."""
    table = tables.runs
    statement = select(table.c.Seq).where(table.c.DagId == value_of(table.c.DagId, "dag_id", sent_by.dag_id))
    if sent_by.run_id is not None:
        statement = statement.where(table.c.RunId == value_of(table.c.RunId, "run_id", sent_by.run_id))
    if sent_by.task_id is not None:
        statement = statement.where(table.c.TaskId == value_of(table.c.TaskId, "task_id", sent_by.task_id))
    if sent_by.map_index is not None:
        statement = statement.where(table.c.MapIndex == value_of(table.c.MapIndex, "map_index", sent_by.map_index))
    return statement
