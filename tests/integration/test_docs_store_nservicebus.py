"""The code of the page on moving from an NServiceBus store is run as it stands, on PostgreSQL and RabbitMQ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import create_engine
from support import pages
from support.examples import note_dags
from support.msmq import fill, row, timeouts_table
from support.rabbitmq import VirtualHost, virtual_host
from support.stores import run_sql

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.nservicebus import nservicebus_time

pytestmark = pytest.mark.long

DUE = datetime(2020, 1, 31, 8, 30, tzinfo=timezone.utc)


def psycopg(url: str) -> str:
    return "postgresql+psycopg://" + url.partition("://")[2]


@pytest.fixture
def database(postgres_url: str, connect) -> Iterator[str]:
    """A database of the test's own, with the tables that the page takes over."""
    name = f"d{uuid4().hex[:8]}"
    url = f"{postgres_url.rpartition('/')[0]}/{name}"
    server = create_engine(psycopg(postgres_url), isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    run_sql(url, "CREATE SCHEMA dbo")
    engine = create_engine(psycopg(url))
    timeouts = timeouts_table("Sales.timeouts", "dbo")
    timeouts.create(engine)
    rows = [row(f"m{n}", DUE + n * timedelta(hours=1)) for n in range(3)]
    billing = row("m4", DUE + timedelta(days=1), Destination="Billing@SERVER2")
    fill(engine, timeouts, [*rows, billing, row("m5", DUE, Destination=None)])
    names = {"Id": "message_id", "State": "body", "Time": "due_utc", "RetryCount": "failures"}
    other = timeouts_table("reminders", "dbo", **names)
    other.create(engine)
    fill(engine, other, [row("m6", DUE, Headers=b'{"a": "b"}', Destination="Sales")])
    engine.dispose()
    connect("sales_db", url)
    yield url
    with server.connect() as connection:
        connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
    server.dispose()


@pytest.fixture
def vhost(rabbitmq_url: str, connect) -> Iterator[VirtualHost]:
    with virtual_host(rabbitmq_url) as host:
        connect("rabbitmq_default", **host.connection_with(topology="nservicebus", routing="direct"))
        host.declare("Sales", "Billing")
        yield host


def test_the_page(here: Path, database: str, vhost: VirtualHost, run_dag, monkeypatch: pytest.MonkeyPatch) -> None:
    made = note_dags(monkeypatch)
    list(pages.run(here / "docs" / "store" / "from-nservicebus.md"))
    (dag,) = made
    # what the old endpoint has stored since
    engine = create_engine(psycopg(database))
    fill(engine, timeouts_table("Sales.timeouts", "dbo"), [row("m7", DUE)])
    engine.dispose()
    assert run_dag(dag).state == "success"
    with closing(DelayedStoreHook("sales_db")) as hook:
        assert hook.count() == 0
    arrived = {queue: vhost.collect(queue, enough=number, more=0.2) for queue, number in (("Sales", 5), ("Billing", 1))}
    ids = {queue: sorted(one.message_id for one in arrivals) for queue, arrivals in arrived.items()}
    assert ids == {"Sales": ["m0", "m1", "m2", "m6", "m7"], "Billing": ["m4"]}
    # an endpoint's critical time counts from there, not from when the dispatcher sent it
    for one in (one for arrivals in arrived.values() for one in arrivals):
        assert one.properties.headers["NServiceBus.DeliverAt"] == nservicebus_time(one.due_at)


def test_what_a_run_tells_is_on_the_page(here: Path) -> None:
    text = (here / "docs" / "store" / "from-nservicebus.md").read_text()
    for name in ("adopted", "duplicates", "failures", "remaining", "by_destination", "first_due"):
        assert f".{name}" in text


def test_links(here: Path) -> None:
    page = here / "docs" / "store" / "from-nservicebus.md"
    assert "store/from-nservicebus.md" in pages.links(here / "docs" / "README.md")
    assert all((page.parent / link).exists() for link in pages.links(page))
