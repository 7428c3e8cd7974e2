"""Reminds of abandoned carts, 30 minutes after the last click unless they were paid; from a stream, once an hour.

Connections: `spark_default` (spark), and `delayed_store` (postgres, ...), which has the store and the queue table
`cart_reminders`. Spark 4.2 or later, for `WATERMARK` in SQL; its driver and executors need this package and the
database's driver, but no Airflow.

Run: unpause it. Each run makes the events of an hour that has passed.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

from airflow.sdk import DAG, task

from airflow_delayed.operators.change import DelayedCancelOperator
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.spark import DelayedSparkSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator

QUEUE = "cart_reminders"
# Spark and Airflow's workers must share this folder.
FOLDER = os.environ.get("ABANDONED_CARTS_FOLDER", f"{Path.home()}/abandoned_carts")
HOUR = timedelta(hours=1)
CARTS_AN_HOUR = 200
# A session ends 30 minutes after its last event, which is when the reminder is due. A payment within these 30 minutes
# belongs to the session. An event of a wrong clock would end all sessions.
REMINDERS = """
    SELECT cart AS message_id, session_window.end AS due_at, to_json(struct(cart, count(*) AS clicks)) AS value
    FROM (SELECT * FROM source WHERE at <= current_timestamp()) WATERMARK at DELAY OF INTERVAL 10 MINUTES
    GROUP BY cart, session_window(at, '30 minutes')
    HAVING NOT bool_or(kind = 'payment')
"""


def events_of(hour: datetime) -> Iterator[tuple[datetime, dict[str, str]]]:
    """Yield the events of carts that were begun in an hour, the same each time, and when each of them arrives."""
    chance = random.Random(hour.timestamp())  # noqa: S311 - the same each time
    for number in range(CARTS_AN_HOUR):
        at = hour + chance.random() * HOUR
        for _ in range(chance.randint(1, 6)):
            yield from _event(chance, f"{hour:%Y%m%d%H}-{number}", "click", at)
            # some come back after the reminder
            at += timedelta(minutes=chance.choice([1, 2, 5, 12, 40]) + chance.random())
        if chance.random() < 0.4:
            yield from _event(chance, f"{hour:%Y%m%d%H}-{number}", "payment", at)


def _event(chance: random.Random, cart: str, kind: str, at: datetime) -> Iterator[tuple[datetime, dict[str, str]]]:
    # out of order by up to 8 minutes, which is less than the watermark
    yield at + timedelta(minutes=8 * chance.random()), {"cart": cart, "kind": kind, "at": at.isoformat()}


with DAG(
    "abandoned_carts",
    schedule="@hourly",
    catchup=False,
    max_active_runs=1,
    doc_md=__doc__,
    tags=["airflow_delayed", "example"],
):

    @task
    def make_events(logical_date: datetime | None = None) -> list[str]:
        """Write the events that arrived in the hour before, and return the carts that were paid in the last day."""
        end = (logical_date or datetime.now(timezone.utc)).replace(minute=0, second=0, microsecond=0)
        arrived = [
            event
            for back in range(1, 7)
            for arrives, event in events_of(end - back * HOUR)
            if end - HOUR <= arrives < end
        ]
        events = Path(FOLDER, "events")
        events.mkdir(parents=True, exist_ok=True)
        unfinished = Path(FOLDER, "unfinished.json")
        unfinished.write_text("".join(json.dumps(event) + "\n" for event in arrived))
        # a stream takes a file as it finds it
        unfinished.rename(events / f"{end:%Y%m%d%H}.json")
        files = sorted(events.glob("*.json"))[-24:]
        lines = (json.loads(line) for file in files for line in file.read_text().splitlines())
        return [event["cart"] for event in lines if event["kind"] == "payment"]

    paid = make_events()
    install = TopologyInstallOperator(
        task_id="install", conn_id="delayed_store", destinations=[QUEUE], create_destinations=True
    )
    send = DelayedSparkSendOperator(
        task_id="send",
        conn_id="delayed_store",
        store_conn_id="delayed_store",
        spark_conn_id="spark_default",
        source=f"{FOLDER}/events",
        source_format="json",
        source_schema="cart string, kind string, at timestamp",
        query=REMINDERS,
        checkpoint=f"{FOLDER}/checkpoints",
        rejects=f"{FOLDER}/rejects",
        destination=QUEUE,
        # a session that begins before the cart's reminder was dispatched moves it
        on_conflict="replace",
        until_due=True,
        # each session has ended by the time that its hour is read
        past_due="send",
        conf={"spark.sql.session.timeZone": "UTC", "spark.sql.shuffle.partitions": "2"},
    )
    # a payment that came later than 30 minutes after the last click, and before the reminder is dispatched
    cancel = DelayedCancelOperator(
        task_id="cancel_paid", store_conn_id="delayed_store", ids=paid, on_missing="ignore", because="the cart was paid"
    )
    dispatch = StoreDispatchOperator(
        task_id="dispatch", store_conn_id="delayed_store", deliver_conn_ids=["delayed_store"]
    )
    [paid, install] >> send >> cancel >> dispatch
