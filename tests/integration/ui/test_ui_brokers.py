"""What the operations page shows of RabbitMQ and SQS, and that it moves back what could not be delivered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from airflow.models.log import Log
from airflow.utils.session import create_session
from sqlalchemy import select
from support.operations_page import Page
from support.rabbitmq import VirtualHost, eventually, messages
from support.sqs import World

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.sqs.settings import QueueSettings


@pytest.fixture
def page(served_page: Page, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_RABBITMQ", "rabbit, nobody")
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_SQS", "sqs_test:orders")
    yield served_page
    served_page.pool.close()


def logged(event: str) -> list[tuple[str | None, str | None]]:
    with create_session() as session:
        found = session.scalars(select(Log).where(Log.event == event).order_by(Log.id)).all()
        return [(one.owner, one.extra) for one in found]


def test_rabbitmq(page: Page, empty_vhost: VirtualHost, connect):
    hook = RabbitMQDelayHook(connect("rabbit", **empty_vhost.connection))
    connect("nobody", conn_type="rabbitmq", host="127.0.0.1", port=1)
    # one that is away does not hold up the other
    assert page.error("GET", "/api/v1/rabbitmq/nobody/summary") == (503, "unreachable")
    assert page.error("GET", "/api/v1/rabbitmq/rabbit/summary") == (409, "not_ready")
    hook.install(["orders", "gone"], create_destinations=True)
    hook.send([*messages("orders", [3000] * 2, prefix="o"), *messages("gone", [6] * 3, prefix="g")])
    with empty_vhost.channel() as channel:
        channel.queue_delete("gone")
    eventually(lambda: empty_vhost.count("delayed.hex.unroutable") == 3)
    found = page.get("/api/v1/rabbitmq/rabbit/summary", "op")
    assert (found["topology"], found["messages"], found["unroutable"], found["missing"]) == ("delayed", 2, 3, [])
    (level,) = found["levels"]
    assert (level["level"], level["messages"]) == (40, 2)

    url = "/api/v1/rabbitmq/rabbit/redrive"
    assert page.post(url, "op", dry_run=True) == {
        "dry_run": True,
        "waiting": 3,
        "destinations": [{"name": "gone", "messages": 3, "problem": "destination 'gone': missing"}],
        "moved": 0,
        "remaining": {},
        "task": None,
    }
    # to which destinations has to be said
    assert page.error("POST", url, "op", json={"dry_run": False}) == (400, "invalid")
    done = page.post(url, "op", dry_run=False, destinations=["gone"])
    assert (done["moved"], done["remaining"]) == (0, {"destination 'gone': missing": 3})
    empty_vhost.declare("gone")
    (found,) = page.post(url, "op", dry_run=True)["destinations"]
    assert "bound" in found["problem"]
    done = page.post(url, "op", dry_run=False, destinations=["another"])
    assert (done["moved"], sum(done["remaining"].values())) == (0, 3)
    done = page.post(url, "op", dry_run=False, destinations=["gone"])
    assert (done["moved"], done["remaining"]) == (3, {})
    assert sorted(one.message_id for one in empty_vhost.collect("gone", enough=3)) == ["g0", "g1", "g2"]
    assert page.get("/api/v1/rabbitmq/rabbit/summary", "op")["unroutable"] == 0
    # what was only counted is not told
    about = '{"connection_id": "rabbit", "destinations": ["gone"]'
    events = logged("delayed_deliveries.redrive")
    assert events[-3] == ("op", about + ', "moved": 0, "remaining": {"destination \'gone\': missing": 3}}')
    assert events[-1] == ("op", about + ', "moved": 3, "remaining": {}}')


def test_an_exchange_that_is_missing_is_a_cause(
    page: Page, empty_vhost: VirtualHost, connect, monkeypatch: pytest.MonkeyPatch
):
    """Messages wait in the levels before it, and their destinations are well."""
    monkeypatch.setattr("airflow_delayed.ui.api_brokers.VERIFY_KEPT", (0.0, 0.0))
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_RABBITMQ", "rabbit")
    hook = RabbitMQDelayHook(connect("rabbit", **empty_vhost.connection))
    hook.install([])

    def causes() -> list[dict[str, str]]:
        found = page.get("/api/v1/health", "op")["causes"]
        return [one for one in found if one["connection_id"] == "rabbit"]

    eventually(lambda: causes() == [])
    empty_vhost.manage("DELETE", "exchanges/{vhost}/delayed.hex.last-1")
    seen: list[dict[str, str]] = []
    # each look is a new one, and may come late
    eventually(lambda: seen.extend(causes()) or any(one["code"] == "missing" for one in seen))
    (cause, *_) = (one for one in seen if one["code"] == "missing")
    assert (cause["severity"], cause["where"]) == ("error", "exchange delayed.hex.last-1")
    assert "airflow delayed install --conn-id rabbit" in cause["remedy"]
    hook.install([])
    eventually(lambda: causes() == [])


def test_sqs(page: Page, world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_SQS", f"sqs_test:{world.destination}, sqs_test:never")
    top = f"/api/v1/sqs/sqs_test/{world.destination}"
    dead = f"{world.queue}-dead"
    settings = QueueSettings(dead_letter_queue=dead, max_receive_count=1)
    assert page.error("GET", f"{top}/summary") == (409, "not_ready")
    world.hook.install([world.destination], create_destinations=True, settings=settings)
    world.hook.send([world.message(800, "later"), *(world.message(0, f"m{number}") for number in range(3))])
    url = world.url_of(world.queue)
    world.client.set_queue_attributes(QueueUrl=url, Attributes={"VisibilityTimeout": "0"})
    eventually(lambda: not world.raw(delete=False) and world.counts(dead)[0] == 3)
    found = page.get(f"{top}/summary", "op")
    assert found["destination"]["queue"] == world.queue
    assert (found["destination"]["waiting"], found["destination"]["delayed"]) == (0, 1)
    assert (found["dead_letter_queue"]["queue"], found["dead_letter_queue"]["waiting"]) == (dead, 3)
    assert found["delay_queue"]["queue"] == world.fifo
    assert found["max_receive_count"] == 1
    assert page.error("GET", "/api/v1/sqs/sqs_test/never/summary") == (409, "not_ready")

    assert page.post(f"{top}/redrive", "op", dry_run=True)["waiting"] == 3
    assert page.post(f"{top}/redrive", "op", dry_run=False)["moved"] == 3
    assert world.ids() == ["m0", "m1", "m2"]
    assert page.get(f"{top}/summary", "op")["dead_letter_queue"]["waiting"] == 0
    (owner, extra) = logged("delayed_deliveries.redrive")[-1]
    assert (owner, f'"queue": "{world.destination}"' in extra, '"moved": 3' in extra) == ("op", True, True)
