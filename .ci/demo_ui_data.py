"""Messages that are late, failed, expired or dispatched, for `make demo-ui`, by the connections of its environment."""

from __future__ import annotations

import sys
import time
from contextlib import closing, suppress
from datetime import datetime, timedelta, timezone

import pika

from airflow_delayed.delivery import delivery_for
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.sqs import SqsDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage
from airflow_delayed.sqs.settings import QueueSettings
from airflow_delayed.store.dispatch.report import DispatchFailed

QUEUE = "appointment-reminders"
NOW = datetime.now(timezone.utc)


def message(name: str, after: timedelta, destination: str = QUEUE, **more: object) -> DelayedMessage:
    fields = {"body": f'{{"reminder": "{name}"}}'.encode(), "headers": {"Content-Type": "application/json"}, **more}
    return DelayedMessage(destination=destination, due_at=NOW + after, message_id=name, **fields)  # type: ignore[arg-type]


def fill_store() -> None:
    minute = timedelta(minutes=1)
    with closing(DelayedStoreHook("delayed_store", "delayed_sqs")) as store:
        store.send(message(f"invoice-{n}", -minute, "closed-queue", tag="billing") for n in range(4))
        store.send(message(f"offer-{n}", -5 * minute, tag="marketing", expires_at=NOW - minute) for n in range(3))
        store.send(message(f"welcome-{n}", -minute, tag="customer-3") for n in range(12))
        # the queue closed-queue does not exist: a message for it fails at once
        with closing(delivery_for("delayed_sqs")) as transport, suppress(DispatchFailed):
            store.dispatcher(["delayed_sqs"], lambda conn_id, clock: transport, lookahead=timedelta(0)).run()
        # nobody dispatches any more
        store.send(message(f"callback-{n}", -20 * minute, tag="customer-7") for n in range(5))


def fill_rabbitmq(url: str) -> None:
    with closing(RabbitMQDelayHook("delayed_rabbitmq")) as broker:
        broker.install(["parcels", "gone"], create_destinations=True)
        broker.send(message(f"parcel-{n}", timedelta(seconds=90 * n + 60), "parcels") for n in range(200))
        # their queue is gone when they are due
        due = datetime.now(timezone.utc) + timedelta(seconds=8)
        broker.send(message(f"late-parcel-{n}", due - NOW, "gone") for n in range(2))
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        connection.channel().queue_delete("gone")
    time.sleep(max(0.0, (due - datetime.now(timezone.utc)).total_seconds() + 1))


def fill_sqs() -> None:
    with closing(SqsDelayHook("delayed_sqs")) as sqs:
        dead = f"{QUEUE}-dead"
        settings = QueueSettings(dead_letter_queue=dead, max_receive_count=5)
        sqs.install([QUEUE], create_destinations=True, settings=settings, repair=True)
        sqs.send(message(f"unread-{n}", timedelta(0), dead) for n in range(3))


if __name__ == "__main__":
    fill_store()
    fill_rabbitmq(sys.argv[1])
    fill_sqs()
