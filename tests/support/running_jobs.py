"""A job in a process of its own, to be killed; see support.forked."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from airflow_delayed.hooks.store import DelayedStoreHook


def work(pipe: Connection, *, conn_id: str, **filters: Any) -> None:
    """Cancel the first thousand messages that match a filter, say the number of the job, and hang."""
    job = DelayedStoreHook(conn_id).begin_job("cancel", {}, actor="user killed", **filters)
    next(iter(job))
    pipe.send(str(job.seq))
    pipe.recv()
