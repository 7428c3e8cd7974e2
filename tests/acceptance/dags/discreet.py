"""Sends of what nobody but its receiver may see, most of which go wrong, and a dispatcher that cannot send it.

Bodies and header values come from files that only the tasks read, so neither this DAG nor Airflow's database has them
unless a task puts them there.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, Asset

from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator


def secret(folder: str) -> str:
    """Return what is secret in a body or a header."""
    return json.loads((Path(folder) / "secrets.json").read_text())["body"]


ROW = {"value": "{{ secret(dag_run.conf.folder) }}", "headers": {"token": "{{ secret(dag_run.conf.folder) }}"}}
FOLDER = "{{ dag_run.conf.folder }}"

with DAG("discreet", schedule=None, catchup=False, user_defined_macros={"secret": secret}):
    common = {"conn_id": "discreet_rabbitmq", "destination": "discreet", "delay": 3600, "retries": 0}
    DelayedSendOperator(
        task_id="sent",
        messages=[ROW],
        tag="{{ dag_run.conf.shown }}",
        outlets=[Asset("told")],
        **common,
    )
    DelayedSendOperator(task_id="planned", messages=[ROW], headers=ROW["headers"], dry_run=True, **common)
    for name in ("rows.jsonl", "types.jsonl", "types.parquet", "rows.parquet"):
        DelayedSendOperator(task_id=f"refused_{name.replace('.', '_')}", source=f"{FOLDER}/{name}", **common)
    DelayedSendOperator(
        task_id="rejected",
        source=f"{FOLDER}/rows.jsonl",
        rejects=f"{FOLDER}/rejects.jsonl",
        **common,
    )
    # a queue that takes nothing
    DelayedSendOperator(task_id="full", messages=[ROW], **{**common, "destination": "discreet-full", "delay": 0})
    DelayedSendOperator(task_id="logged_out", messages=[ROW], **{**common, "conn_id": "discreet_logged_out"})
    DelayedSendOperator(task_id="sqs", messages=[ROW], **{**common, "conn_id": "discreet_sqs", "delay": 60})
    DelayedSendOperator(task_id="store", messages=[ROW], store_conn_id="discreet_store", **common)
    # what a test has put into the store for queues that take nothing, or are not there
    StoreDispatchOperator(
        task_id="dispatch",
        store_conn_id="discreet_store",
        deliver_conn_ids=["discreet_rabbitmq"],
        number_of_retries=0,
        lookahead=timedelta(0),
        # stays in the triggerer until it is marked failed
        until=timedelta(hours=1),
        deferrable=True,
        retries=0,
    )
