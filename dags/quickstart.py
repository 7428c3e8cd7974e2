"""The first example: a message that arrives after ten seconds, in a SQLite file. docs/start/quickstart.md runs it."""

from __future__ import annotations

from airflow.sdk import DAG, BaseHook, task

from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator

DB = "delayed_store"
with DAG("quickstart", doc_md=__doc__, tags=["airflow_delayed", "example"]):
    install = TopologyInstallOperator(task_id="install", conn_id=DB, destinations=["hello"], create_destinations=True)
    send = DelayedSendOperator(task_id="send", conn_id=DB, destination="hello", value="Hello!", delay=10)
    deliver = StoreDispatchOperator(task_id="deliver", store_conn_id=DB, deliver_conn_ids=[DB], until="empty")

    @task
    def read() -> list[tuple[str]]:
        rows = BaseHook.get_hook(DB).get_records("DELETE FROM hello RETURNING CAST(body AS TEXT)")
        print("arrived:", rows)
        return rows

    install >> send >> deliver >> read()
