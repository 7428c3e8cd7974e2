"""Asks an NServiceBus endpoint on RabbitMQ, waits for its reply without a worker, and goes on with the answer.

Connection: `delayed_rabbitmq` (rabbitmq), with `"topology": "nservicebus"` in its extra.

Run: start an endpoint that handles `Acme.PriceRequest` and replies, then trigger it with the number of an order.
"""

from __future__ import annotations

import json
from datetime import timedelta

from airflow.sdk import DAG, Param, task

from airflow_delayed.nservicebus import headers
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator
from airflow_delayed.replies import Reply
from airflow_delayed.sensors.reply import ReplySensor

ENDPOINT, REPLIES = "acme.prices", "airflow.results"


def price_of(reply: Reply) -> int:
    """Return what the next task needs; the body itself should be in no XCom."""
    return int(json.loads(reply.body)["Price"])


with DAG(
    "ask_dotnet",
    schedule=None,
    doc_md=__doc__,
    params={"order": Param(7, type="integer")},
    tags=["airflow_delayed", "example"],
):
    install = TopologyInstallOperator(
        task_id="install", conn_id="delayed_rabbitmq", destinations=[ENDPOINT, REPLIES], create_destinations=True
    )
    ask = DelayedSendOperator(
        task_id="ask",
        conn_id="delayed_rabbitmq",
        destination=ENDPOINT,
        value='{"Order": {{ params.order }}}',
        delay=5,
        headers=headers("Acme.PriceRequest", reply_to=REPLIES),
    )
    answer = ReplySensor(
        task_id="answer",
        conn_id="delayed_rabbitmq",
        reply_to=REPLIES,
        message_id="{{ ti.xcom_pull('ask')['message_ids'][0] }}",
        on_reply=price_of,
        timeout=timedelta(minutes=10),
    )

    @task
    def go_on(price: int) -> None:
        """Print the price."""
        print("the price is", price)

    install >> ask >> answer
    go_on(answer.output)
