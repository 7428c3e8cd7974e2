"""A callback in a process of its own, which waits for its start."""

from __future__ import annotations

from datetime import datetime
from multiprocessing.connection import Connection
from types import SimpleNamespace

from airflow_delayed.notifications import store_calls
from airflow_delayed.notifications.notifiers import DelayedNotifier
from support.forked import PATIENCE


def arm(pipe: Connection, store: str, map_index: int, started_at: datetime) -> None:
    """Arm for one instance of a mapped task of a run that goes on, and say when that is done."""
    # so many processes at once may take longer on a slow machine
    store_calls.CALL_SECONDS = float(PATIENCE)
    notifier = DelayedNotifier(conn_id="broker", store_conn_id=store, destination="desk", delay=1800)
    run = {"dag_id": "etl", "run_id": "a", "start_date": started_at}
    ti = SimpleNamespace(id=f"try of {map_index}", task_id="load", map_index=map_index, end_date=started_at)
    pipe.send("ready")
    pipe.recv()
    notifier.notify({"run_id": "a", "dag_run": run, "ti": ti})
    pipe.send("done")
