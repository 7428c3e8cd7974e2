"""A callback in a process of its own, which waits for its start."""

from __future__ import annotations

from datetime import datetime
from multiprocessing.connection import Connection

from airflow_delayed.notifications import store_calls
from airflow_delayed.notifications.callback_run import CallbackRun
from airflow_delayed.notifications.notifiers import DelayedNotifier
from support.forked import PATIENCE


def arm(pipe: Connection, store: str, map_index: int, started_at: datetime) -> None:
    """Arm for one instance of a mapped task of a run that goes on, and say what became of it."""
    # so many processes at once may take longer on a slow machine
    store_calls.SECONDS = float(PATIENCE)
    notifier = DelayedNotifier(conn_id="broker", store_conn_id=store, destination="desk", delay=1800)
    run = CallbackRun.of_run(
        dag_id="etl",
        run_id="a",
        start_date=started_at,
        task_id="load",
        map_index=map_index,
        try_id=f"try of {map_index}",
        task_end_date=started_at,
    )
    pipe.send("ready")
    pipe.recv()
    pipe.send(notifier.arm(run).value)
