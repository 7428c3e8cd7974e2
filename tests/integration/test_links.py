"""The links from a task instance to the page of delayed deliveries, as Airflow's UI gets them."""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG
from airflow.serialization.definitions.operatorlink import XComOperatorLink

from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator

PAGE = "/airflow/plugin/delayed-deliveries"


def links(run: Any, *classes: type) -> dict[str, str]:
    """The links of each task instance, without those that are empty, which the UI does not show."""
    found = {}
    for ti in run.get_task_instances():
        (link,) = next(kind for kind in classes if kind.__name__ == ti.operator).operator_extra_links
        address = XComOperatorLink(name=link.name, xcom_key=link.xcom_key).get_link(None, ti_key=ti.key)
        if address:
            found[ti.task_id + (f"[{ti.map_index}]" if ti.map_index >= 0 else "")] = f"{link.name}: {address}"
    return found


def test_links(tmp_path, connect, run_dag, monkeypatch):
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://air.example/airflow/")
    connect("reminders_db", conn_type="sqlite", host=str(tmp_path / "messages.db"))
    with DAG("links", schedule=None) as dag:
        install = TopologyInstallOperator(
            task_id="install", conn_id="reminders_db", destinations=["mail"], create_destinations=True
        )
        message = {"conn_id": "reminders_db", "destination": "mail", "value": "v"}
        send = DelayedSendOperator.partial(task_id="send", **message).expand(delay=[0, 3600])
        # stores nothing
        plan = DelayedSendOperator(task_id="plan", delay=1, dry_run=True, **message)
        dispatch = StoreDispatchOperator(
            task_id="dispatch", store_conn_id="reminders_db", deliver_conn_ids="reminders_db"
        )
        install >> send >> plan >> dispatch
    run = run_dag(dag)
    assert run.state == "success"
    asked = f"store=reminders_db&dag_id=links&run_id={run.run_id.replace(':', '%3A').replace('+', '%2B')}&task_id=send"
    assert links(run, TopologyInstallOperator, DelayedSendOperator, StoreDispatchOperator) == {
        "install": f"Delayed deliveries: {PAGE}",
        "send[0]": f"Messages in the store: {PAGE}/airflow/delayed-deliveries/?{asked}&map_index=0",
        "send[1]": f"Messages in the store: {PAGE}/airflow/delayed-deliveries/?{asked}&map_index=1",
        "dispatch": f"Delayed deliveries: {PAGE}/airflow/delayed-deliveries/?store=reminders_db",
    }
