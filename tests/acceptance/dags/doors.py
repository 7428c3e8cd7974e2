"""Waits in the triggerer, and changes of messages that wait in the store."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, task

from airflow_delayed.operators.change import DelayedCancelOperator, DelayedRescheduleOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator
from airflow_delayed.sensors.due_time import DueTimeSensor

SOON = "{{ (dag_run.run_after + macros.timedelta(seconds=%s)).isoformat() }}"

with DAG("waits", schedule=None, catchup=False):
    DueTimeSensor(task_id="in_the_triggerer", target_time=SOON % 5, start_from_trigger=True, end_from_trigger=True)
    DueTimeSensor(task_id="past", target_time=SOON % 0)
    # Airflow takes a task for killed that is resumed before the scheduler has heard that its worker ended, which takes
    # up to six seconds and more on a busy machine
    DueTimeSensor.partial(task_id="mapped", start_from_trigger=True).expand(target_time=[SOON % 20, SOON % 22])
    DueTimeSensor(
        task_id="too_long",
        target_time="2999-01-01T00:00:00Z",
        start_from_trigger=True,
        timeout=timedelta(seconds=2),
        soft_fail=True,
    )

with DAG("wait_for_no_time", schedule=None, catchup=False):
    DueTimeSensor(task_id="wait", target_time="{{ '2030-01-01T00:00' }}", start_from_trigger=True)

with DAG("change_of_mind", schedule=None, catchup=False):
    install = TopologyInstallOperator(
        task_id="install", conn_id="delayed_store", destinations=["minds"], create_destinations=True
    )
    to = {"conn_id": "delayed_store", "destination": "minds"}
    first = DelayedSendOperator(task_id="first", value="one", delay=86_400, **to)
    rows = [{"value": name, "tag": name, "delay_seconds": 86_400} for name in ("ann", "bob", "eve")]
    more = DelayedSendOperator(task_id="more", messages=rows, **to)

    @task
    def tags() -> list[str]:
        """Return the customers whose messages are moved."""
        return ["ann", "bob"]

    by_ids = DelayedCancelOperator(task_id="by_ids", store_conn_id="delayed_store", ids=first.output, on_missing="fail")
    moved = DelayedRescheduleOperator.partial(task_id="moved", store_conn_id="delayed_store", delay=7200).expand(
        tag=tags()
    )
    rest = DelayedCancelOperator(
        task_id="rest",
        store_conn_id="delayed_store",
        sent_by={"dag_id": "{{ dag.dag_id }}", "run_id": "{{ run_id }}"},
    )
    install >> first >> more >> by_ids >> moved >> rest
