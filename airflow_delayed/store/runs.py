"""The runs of tasks that store messages: the table ``_runs``.

A message's row has only the number of the run that stored it; this table has the rest, and the anchor of its delays.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import Connection, Select, delete, exists, insert, or_, select, update

from airflow_delayed.identity import Origin, SentBy
from airflow_delayed.store.dialects import database_time
from airflow_delayed.store.schema import Tables

#: A run without messages in the store is kept at least so long after it last began to store.
RUN_KEPT = timedelta(days=7)
#: The most runs that one transaction deletes.
RUNS_FORGOTTEN = 100


def matching_runs(tables: Tables, sent_by: SentBy) -> Select[tuple[int]]:
    """Return the query for the numbers of runs."""
    table = tables.runs
    statement = select(table.c.Seq).where(table.c.DagId == sent_by.dag_id)
    if sent_by.run_id is not None:
        statement = statement.where(table.c.RunId == sent_by.run_id)
    if sent_by.task_id is not None:
        statement = statement.where(table.c.TaskId == sent_by.task_id)
    if sent_by.map_index is not None:
        statement = statement.where(table.c.MapIndex == sent_by.map_index)
    return statement


def register(connection: Connection, tables: Tables, origin: Origin) -> int:
    """Return the number of a run, and insert the run if it is new. Commit it before its messages are stored."""
    runs, now = tables.runs, database_time(connection)
    row = connection.execute(select(runs.c.Seq, runs.c.At).where(runs.c.Digest == origin.digest)).one_or_none()
    if row is not None:
        # a later At keeps dispatchers from deleting the run before its messages are stored
        if now - row.At > RUN_KEPT / 7:
            again = update(runs).where(runs.c.Seq == row.Seq).values(At=now)
            if not connection.execute(again).rowcount:
                return _insert_run(connection, tables, origin, now)
        return int(row.Seq)
    return _insert_run(connection, tables, origin, now)


def _insert_run(connection: Connection, tables: Tables, origin: Origin, now: datetime) -> int:
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


def number_of(connection: Connection, tables: Tables, origin: Origin) -> int | None:
    """Return the number of a run; None: it has stored nothing, or nothing of it is there."""
    number = connection.execute(select(tables.runs.c.Seq).where(tables.runs.c.Digest == origin.digest)).scalar()
    return None if number is None else int(number)


def anchor_of(connection: Connection, tables: Tables, origin: Origin, turn: str | None) -> datetime | None:
    """Return the time from which a run's relative delays count, stored by its first try; None: no time is stored."""
    runs = tables.runs
    kept = select(runs.c.Anchor, runs.c.Turn).where(runs.c.Digest == origin.digest)
    row = connection.execute(kept).one_or_none()
    return row.Anchor if row is not None and row.Turn == turn else None


def keep_anchor(connection: Connection, tables: Tables, origin: Origin, turn: str | None, anchor: datetime) -> None:
    """Store the time from which a run's relative delays count, in place of an earlier one."""
    runs, number = tables.runs, register(connection, tables, origin)
    connection.execute(update(runs).where(runs.c.Seq == number).values(Turn=turn, Anchor=anchor))


def forget(connection: Connection, tables: Tables, before: datetime, now: datetime) -> int:
    """Examine up to 100 runs that began to store before a time, and delete unused ones; return how many."""
    runs = tables.runs
    old = runs.c.At < min(before, now - RUN_KEPT)
    oldest = select(runs.c.Seq).where(old).order_by(runs.c.At).limit(RUNS_FORGOTTEN)
    numbers = list(connection.execute(oldest).scalars())
    if numbers:
        places = (tables.messages, tables.failed, tables.cancelled, tables.past)
        left = [exists().where(table.c.Run == runs.c.Seq) for table in places]
        used = set(connection.execute(select(runs.c.Seq).where(runs.c.Seq.in_(numbers), or_(*left))).scalars())
        connection.execute(update(runs).where(runs.c.Seq.in_(sorted(used))).values(At=now))
        unused = [number for number in numbers if number not in used]
        # the condition again: a run that has just begun to store has a later At
        connection.execute(delete(runs).where(runs.c.Seq.in_(sorted(unused)), old))
    return len(numbers)
