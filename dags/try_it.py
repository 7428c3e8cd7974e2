"""Tries a connection: makes a queue, sends a message that is due in 5 s, reads it there, and says how late it came.

Connections: those that you have of `delayed_sqs` (aws), `delayed_rabbitmq` (rabbitmq), `delayed_store` (SQL).

Run: unpause and trigger the DAG of a connection, such as `try_it_rabbitmq`; its task `compare` returns the seconds.
"""

from __future__ import annotations

import time
from contextlib import closing
from datetime import datetime

from airflow.sdk import DAG, BaseHook, Param, task

from airflow_delayed.message import utcnow
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator


def read(conn_id: str, queue: str) -> str:
    """Take the next message of a queue, or look at the last of a queue table, and return its body."""
    if conn_id == "delayed_store":
        row = BaseHook.get_hook(conn_id).get_first(f"SELECT body FROM {queue} ORDER BY seq DESC")  # noqa: S608
        return bytes(row[0]).decode() if row else ""
    if conn_id == "delayed_rabbitmq":
        with closing(BaseHook.get_hook(conn_id).get_conn()) as broker:
            return (broker.channel().basic_get(queue, auto_ack=True)[2] or b"").decode()
    from airflow.providers.amazon.aws.hooks.sqs import SqsHook

    sqs = SqsHook(aws_conn_id=conn_id).get_conn()
    url = sqs.get_queue_url(QueueName=queue)["QueueUrl"]
    for message in sqs.receive_message(QueueUrl=url).get("Messages", []):
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        return message["Body"]
    return ""


@task
def compare(conn_id: str, sent: dict[str, str], run_id: str, params: dict[str, str]) -> float:
    """Wait for the message, whose body is the run's id, and return how many seconds late it is."""
    end = time.monotonic() + 60
    while read(conn_id, params["queue"]) != run_id:
        assert time.monotonic() < end, f"not there in a minute; try: airflow delayed doctor --conn-id {conn_id}"
        time.sleep(0.1)
    return (utcnow() - datetime.fromisoformat(sent["first_due"])).total_seconds()


options = {"params": {"queue": Param("try_it", pattern=r"^\w+$")}, "tags": ["airflow_delayed", "example"]}
for conn in ("delayed_sqs", "delayed_rabbitmq", "delayed_store"):
    with DAG("try_it_" + conn.removeprefix("delayed_"), doc_md=__doc__, **options):
        to = "{{ params.queue }}"
        install = TopologyInstallOperator(task_id="install", conn_id=conn, destinations=[to], create_destinations=True)
        send = DelayedSendOperator(task_id="send", conn_id=conn, destination=to, value="{{ run_id }}", delay=5)
        done = compare(conn, send.output)
        install >> send >> done
        if conn == "delayed_store":
            go = StoreDispatchOperator(task_id="go", store_conn_id=conn, deliver_conn_ids=[conn], until="empty")
            send >> go >> done
