"""The message that a Celery worker runs, and the warning where it could not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_delayed.celery import task
from airflow_delayed.delivery import Connection
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.rabbitmq.transport import RabbitMQTransport

HEADERS = {"content-type": "application/json", "lang": "py", "task": "shop.remind"}


def celery(**extra: str) -> RabbitMQTransport:
    connection = Connection(conn_id="c", conn_type="rabbitmq", host="h", extra={"topology": "celery", **extra})
    return RabbitMQTransport("c", lambda: connection, clock=utcnow)


@pytest.mark.parametrize(
    "given, body",
    [
        (("shop.remind",), [[], {}, {}]),
        (("shop.remind", [17]), [[17], {}, {}]),
        (("shop.remind", (17, "ü"), {"by": "mail"}), [[17, "ü"], {"by": "mail"}, {}]),
    ],
)
def test_a_row_and_parameters_of_a_send(run, given: tuple[Any, ...], body: list[Any]) -> None:
    run.execute(messages=[{**task(*given), "delay_seconds": 60}])
    run.execute(**task(*given), delay=60)
    for message in run.transport.sent:
        assert json.loads(message.body) == body
        assert message.headers == HEADERS


@pytest.mark.parametrize(
    "given, problem",
    [
        (("", [17]), "name is empty"),
        (("shop.remind", "17"), "args must be a list of the task's arguments, not str"),
        (("shop.remind", {"order": 17}), "args must be a list of the task's arguments, not dict"),
        (("shop.remind", [], [17]), "kwargs must be a dictionary of the task's arguments, not list"),
    ],
)
def test_what_is_no_task(given: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        task(*given)


def test_a_message_without_a_task_is_warned_of_on_celerys_levels(run, log, monkeypatch) -> None:
    monkeypatch.setattr(run.transport, "receiver_warning", celery().receiver_warning)
    run.execute(messages=[{"value": {"order": 17}, "delay_seconds": 60}])
    (line,) = (line for line in log.text.splitlines() if "has no header task" in line)
    assert "a Celery worker would delete it" in line
    assert "airflow_delayed.celery.task(" in line
    run.execute(messages=[{**task("shop.remind", [17]), "delay_seconds": 60}])
    assert log.text.count("has no header task") == 1


def test_others_need_no_task() -> None:
    message = DelayedMessage(destination="q", body=b"", due_at=utcnow(), message_id="m")
    assert celery(topology="delayed").receiver_warning(message) is None
