"""A DAG of a bundle that has versions, and so callbacks of two versions at once."""

from __future__ import annotations

from airflow.sdk import DAG
from playing import callbacks, work_of

with DAG("released", schedule=None, max_active_runs=32, **callbacks()):
    work_of("released")
