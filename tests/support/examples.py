"""Example DAGs, and what their tasks returned."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from airflow.sdk import DAG


def dags_of(path: Path, monkeypatch) -> dict[str, DAG]:
    """Return the DAGs of a file by their ids."""
    made: dict[str, DAG] = {}

    class Noted(DAG):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made[self.dag_id] = self

    monkeypatch.setattr("airflow.sdk.DAG", Noted)
    runpy.run_path(str(path))
    return made


def result(run: Any, task_id: str) -> Any:
    """Return what a task of a run returned; the run has succeeded."""
    assert run.state == "success"
    (instance,) = (one for one in run.get_task_instances() if one.task_id == task_id)
    return instance.xcom_pull(task_ids=task_id)
