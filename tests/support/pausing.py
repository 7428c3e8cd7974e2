"""A dispatcher of RabbitMQ as a process of its own, to be killed; see support.forked."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.connection import Connection

from airflow_delayed.delivery import delivery_for
from airflow_delayed.hooks.store import DelayedStoreHook


def dispatch(pipe: Connection, *, conn_id: str, schema: str | None, deliver_conn_id: str, max_rate: float) -> None:
    """Dispatch until no message is left, and say how many were dispatched."""
    store = DelayedStoreHook(conn_id, deliver_conn_id, schema=schema)
    made = store.dispatcher(
        [deliver_conn_id], delivery_for, stays=True, claim_timeout=timedelta(seconds=30), max_rate=max_rate
    )
    pipe.send("ready")
    pipe.send(made.run("empty").dispatched)
    store.close()
