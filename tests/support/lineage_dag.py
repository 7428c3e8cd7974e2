"""A DAG that sends and dispatches, run once: python -m support.lineage_dag SOURCE."""

from __future__ import annotations

import os
import sys

from airflow.dag_processing.bundles.manager import DagBundlesManager
from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
from airflow.sdk import DAG

from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator

if __name__ == "__main__":
    with DAG("traced", schedule=None) as dag:
        names = {"conn_id": "reminders_db", "destinations": ["mail", "text"], "create_destinations": True}
        install = TopologyInstallOperator(task_id="install", **names)
        send = DelayedSendOperator(task_id="send", conn_id="reminders_db", source=sys.argv[1])
        # what is said in the DAG itself
        secret = {"value": "hush", "headers": {"token": "hush"}, "delay": 3600, "destination": "mail"}
        one = DelayedSendOperator(task_id="one", conn_id="reminders_db", **secret)
        dispatch = StoreDispatchOperator(task_id="dispatch", conn_id="reminders_db", deliver_conn_ids="reminders_db")
        install >> send >> one >> dispatch
    bag = DagBag(os.devnull)
    bag.bag_dag(dag)
    DagBundlesManager().sync_bundles_to_db()
    sync_bag_to_db(bag, "dags-folder", None)
    assert dag.test().state == "success"
