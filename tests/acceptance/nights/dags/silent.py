"""A DAG with five notifiers at a store that does not answer, and another callback behind them; in a file by itself."""

from __future__ import annotations

from airflow.sdk import DAG
from playing import called, note, work_of

with DAG(
    "silent",
    schedule=None,
    on_failure_callback=[
        *(note(conn_id="silent", store_conn_id="silent", delay=60 * minutes) for minutes in range(1, 6)),
        called("failure"),
    ],
):
    work_of("silent")
