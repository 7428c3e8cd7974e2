"""Taking over a table in a process that kills itself (SIGKILL) at a moment that a test chooses.

python -m support.adopting, its arguments as JSON. It says "ready", and for each line that it is given (``read``,
``stored`` or ``deleted``) a child takes the table over until it dies at that moment of its second batch. Then it says
what ended the child.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from sqlalchemy import Engine, event

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store import copying


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

    by_copy = copying.copy

    def copy(*arguments: Any) -> None:
        # on PostgreSQL, past SQLAlchemy's cursors
        reached("read")
        by_copy(*arguments)

    copying.copy = copy

    @event.listens_for(engine, "after_cursor_execute")
    def after(connection: Any, cursor: Any, statement: str, *_: object) -> None:
        if statement.startswith("DELETE FROM") and table in statement:
            reached("deleted")


def main(conn_id: str, **arguments: Any) -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            hook = DelayedStoreHook(conn_id, "broker", schema=arguments["schema"])
            die_at(line.strip(), hook.engine, arguments["table"])
            hook.adopt(**arguments)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
