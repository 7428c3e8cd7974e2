"""The spool of a task's try: which file, and how long it stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_delayed import config
from airflow_delayed.compat import AirflowSkipException, TaskDeferred
from airflow_delayed.errors import InputError
from airflow_delayed.identity import scope_of
from airflow_delayed.intake.spool import Spool
from airflow_delayed.operators.send_arguments import origin_of
from airflow_delayed.operators.task_state import turn_of

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delayed.sending import Log


@contextmanager
def spool_of(context: Context, log: Log, *, retries: int, resumed: bool) -> Iterator[Spool]:
    """Open the spool of a try. It is kept for as long as the same send may go on.

    It is deleted after a success, a refusal and the last try. A task that is cleared has another spool: its rows are
    produced again.

    :param retries: of the task, as its DAG has them now.
    :param resumed: this try goes on after it was deferred.
    """
    ti, run = context["ti"], context.get("dag_run")
    # a run that was deleted may come again with its name
    began = str(getattr(run, "start_date", None))
    later = ti.try_number > max(1, ti.max_tries - retries + 1)
    spool = Spool(
        Path(config.spool_folder()),
        scope_of(*origin_of(context).parts, turn_of(context), began),
        limit=config.spool_limit(),
        reuse=later or resumed,
        log=log,
    )
    try:
        yield spool
    except TaskDeferred:
        spool.close()
        raise
    except (InputError, AirflowSkipException):
        spool.delete()
        raise
    except BaseException:
        (spool.close if ti.try_number <= ti.max_tries else spool.delete)()
        raise
    spool.delete()
