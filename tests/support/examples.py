"""Example DAGs, and what their tasks returned."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG


def note_dags(monkeypatch: pytest.MonkeyPatch) -> list[DAG]:
    """Return a list, to which each DAG is added that code makes from now on; it has to import the class first."""
    made: list[DAG] = []

    class Noted(DAG):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr("airflow.sdk.DAG", Noted)
    return made


def dags_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, DAG]:
    """Return the DAGs of a file by their ids."""
    made = note_dags(monkeypatch)
    runpy.run_path(str(path))
    return {dag.dag_id: dag for dag in made}


def result(run: Any, task_id: str) -> Any:
    """Return what a task of a run returned; the run has succeeded."""
    assert run.state == "success"
    (instance,) = (one for one in run.get_task_instances() if one.task_id == task_id)
    return instance.xcom_pull(task_ids=task_id)
