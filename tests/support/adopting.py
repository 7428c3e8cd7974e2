"""Taking over a table in a process that kills itself (SIGKILL) at a moment that a test chooses; see support.forked."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from sqlalchemy import Engine, event

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store import bulk


def die_at(moment: str, engine: Engine, table: str) -> None:
    """Die when a batch is read and not stored, or stored and not deleted, or deleted and not committed."""
    seen = {"stored": 0, "deleted": 0}

    def reached(name: str) -> None:
        if name == moment and seen["stored"] + (name == "read") == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    @event.listens_for(engine, "before_cursor_execute")
    def before(connection: Any, cursor: Any, statement: str, *_: object) -> None:
        if statement.startswith("INSERT INTO") and "delayed_messages" in statement:
            reached("read")
        if statement.startswith("DELETE FROM") and table in statement:
            seen["stored"] += 1
            reached("stored")

    by_copy = bulk.copy

    def copy(*arguments: Any) -> None:
        # on PostgreSQL, past SQLAlchemy's cursors
        reached("read")
        by_copy(*arguments)

    bulk.copy = copy

    @event.listens_for(engine, "after_cursor_execute")
    def after(connection: Any, cursor: Any, statement: str, *_: object) -> None:
        if statement.startswith("DELETE FROM") and table in statement:
            reached("deleted")


def adopt(pipe: Connection, *, moment: str, conn_id: str, **arguments: Any) -> None:
    """Take a table over, and die at a moment of the second batch: ``read``, ``stored`` or ``deleted``."""
    hook = DelayedStoreHook(conn_id, "broker", schema=arguments["schema"])
    die_at(moment, hook.engine, arguments["table"])
    hook.adopt(**arguments)
