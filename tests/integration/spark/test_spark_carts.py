"""dags/abandoned_carts.py: a small night of it, compared with a reference in plain Python."""

from __future__ import annotations

import json
import runpy
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from pyspark.sql import SparkSession
from support.examples import result
from support.lengths import length

pytestmark = pytest.mark.long

GAP, DELAY = timedelta(minutes=30), timedelta(minutes=10)
HOURS = length("hours of abandoned carts", 3, 8)
NIGHT = datetime(2026, 1, 31, 22, tzinfo=timezone.utc)


def sessions_of(events: list[dict[str, Any]]) -> Iterator[tuple[str, datetime, int, bool]]:
    """Yield the cart, the end, the number of events and whether it was paid, of each session."""
    by_cart: dict[str, list[dict[str, Any]]] = {}
    for event in sorted(events, key=lambda event: event["at"]):
        by_cart.setdefault(event["cart"], []).append(event)
    for cart, of_cart in by_cart.items():
        session: list[dict[str, Any]] = []
        for event in [*of_cart, None]:
            if session and (event is None or event["at"] > session[-1]["at"] + GAP):
                paid = any(one["kind"] == "payment" for one in session)
                yield cart, session[-1]["at"] + GAP, len(session), paid
                session = []
            if event is not None:
                session.append(event)


def reminded(hours: list[list[dict[str, Any]]]) -> dict[str, int]:
    """Return the carts that are reminded, and the clicks of the session, by the hours in which events arrive."""
    sent: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for hour in hours:
        events += hour
        watermark = max(event["at"] for event in events) - DELAY
        paid_by_now = {event["cart"] for event in events if event["kind"] == "payment"}
        last: dict[str, tuple[datetime, int]] = {}
        for cart, end, clicks, paid in sessions_of(events):
            if end <= watermark and not paid and cart not in sent:
                last[cart] = max((end, clicks), last.get(cart, (end, clicks)))
        sent |= {cart: clicks for cart, (_, clicks) in last.items() if cart not in paid_by_now}
    return sent


@pytest.mark.timeout(900)
def test_a_night_of_carts(
    here: Path, spark: SparkSession, connect, run_dag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ABANDONED_CARTS_FOLDER", str(tmp_path))
    connect("delayed_store", conn_type="sqlite", host=str(tmp_path / "store.db"))
    connect("spark_default", conn_type="spark", host="local[2]")
    dag = DagBag(str(here / "dags/abandoned_carts.py")).dags["abandoned_carts"]

    def submit(operator: Any, context: Any) -> None:
        # in the Spark that runs already
        job = runpy.run_path(operator.application)
        args = job["arguments"](operator.application_args)
        options = {**dict(args.set), "connections_file": operator.files}
        job["send_stream"](job["read"](spark, args), options, args.checkpoint)

    monkeypatch.setattr(SparkSubmitOperator, "execute", submit)
    sent = 0
    for hour in range(HOURS):
        run = run_dag(dag, logical_date=NIGHT + hour * timedelta(hours=1))
        summary = result(run, "send")
        assert summary["rejected"] == 0
        sent += summary["stored"]
    files = sorted((tmp_path / "events").iterdir())
    assert len(files) == HOURS
    hours = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    for event in (event for events in hours for event in events):
        event["at"] = datetime.fromisoformat(event["at"])
    wanted = reminded(hours)
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        bodies = [json.loads(body) for (body,) in connection.execute("SELECT body FROM cart_reminders")]
    assert {body["cart"]: body["clicks"] for body in bodies} == wanted
    assert len(bodies) == len(wanted) > 50
    # payments that came while the reminder waited
    assert sent > len(wanted)
