"""The workers of polling_dag.py: each task of a contestant in a process of its own, which can be killed.

It imports what all need, and then forks for each line of its input, ``[contestant, action, environment, argument]`` as
JSON, as Airflow's own supervisor does for each task. It prints ``started`` with the process id, what the action prints,
and ``ended`` with the exit code (negative: the signal).

- ``store`` makes the tables, and stores rows of id, customer, body and due time.
- ``run`` does what a run of the contestant's DAG does.
- ``take-back`` takes back what belongs to a customer, and measures it; the argument names the customer, and the process
  id of PostgreSQL.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

#: A table and a DAG in three ways, and this package.
AFTER, BEFORE, AHEAD, PACKAGE = "mark-after", "mark-before", "ahead", "package"
#: As far ahead as this package looks by default.
LOOKAHEAD = timedelta(minutes=15)


def act(name: str, action: str, argument: Any) -> None:
    import polling_package
    import polling_peer
    from measured import measure

    polling_peer.MARK_FIRST = name == BEFORE
    if name == AHEAD:
        polling_peer.AHEAD = LOOKAHEAD
    module = polling_package if name == PACKAGE else polling_peer
    if action == "store":
        module.install()
        if argument:
            module.remind((*row, datetime.fromisoformat(due_at)) for *row, due_at in argument)
    elif action == "take-back":
        customer, server = argument
        measure(server, lambda: module.take_back(customer))
    elif name == PACKAGE:
        polling_package.dispatch.execute({})
    else:
        polling_peer.send_due()


def child(name: str, action: str, environment: dict[str, str], argument: Any) -> None:
    """Do it, and end."""
    os.environ.update(environment)
    try:
        act(name, action, argument)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
    with tempfile.TemporaryDirectory(prefix="airflow-delayed-") as home:
        os.environ["AIRFLOW_HOME"] = home
        import polling_package  # noqa: F401
        import polling_peer  # noqa: F401

        for line in sys.stdin:
            request = json.loads(line)
            pid = os.fork()
            if not pid:
                child(*request)
            print("started", pid, flush=True)
            print("\nended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
