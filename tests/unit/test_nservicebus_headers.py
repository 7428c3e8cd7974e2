"""The headers by which an NServiceBus endpoint handles a message, and the warning where they are missing."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from support import pages
from support.send_runs import rows

from airflow_delayed.delivery import Connection
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.nservicebus import headers
from airflow_delayed.rabbitmq.transport import RabbitMQTransport
from airflow_delayed.sqs.transport import SqsTransport

TYPE = "Acme.Reminder, Acme.Messages"
VECTORS = ("rabbitmq/nservicebus_rabbitmq.json", "sqs/nservicebus_sqs.json")
NO_TYPE = "NServiceBus.EnclosedMessageTypes"


def test_a_type_alone_is_enough() -> None:
    assert headers(TYPE) == {
        "NServiceBus.EnclosedMessageTypes": TYPE,
        "NServiceBus.ContentType": "application/json",
    }


def test_all_that_may_be_given() -> None:
    assert headers("Acme.Reminder", "airflow.results", "text/xml", "conversation-7") == {
        "NServiceBus.EnclosedMessageTypes": "Acme.Reminder",
        "NServiceBus.ContentType": "text/xml",
        "NServiceBus.ReplyToAddress": "airflow.results",
        "NServiceBus.ConversationId": "conversation-7",
    }


@pytest.mark.parametrize("vectors", VECTORS)
def test_an_endpoint_has_handled_messages_with_these_headers(vectors: str) -> None:
    """Each recorded message of ours had them, and no further header of NServiceBus but the transport's."""
    handled = json.loads((Path(__file__).parent / vectors).read_text())["headers_of_ours_as_a_handler_sees_them"]
    assert handled
    for one in handled:
        seen = one["headers"]
        made = headers(seen["NServiceBus.EnclosedMessageTypes"], seen.get("NServiceBus.ReplyToAddress"))
        assert made.items() <= seen.items()


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_type_is_an_error(empty: str) -> None:
    with pytest.raises(ValueError, match="message_type is empty"):
        headers(empty)


def test_the_page_and_its_code(run, monkeypatch) -> None:
    page = Path(__file__).resolve().parents[2] / "docs/dotnet.md"
    ((_, block),) = pages.blocks(page)
    names: dict[str, Any] = {}
    exec(compile(block, str(page), "exec"), names)
    (task,) = names["dag"].tasks
    monkeypatch.setattr(run.transport, "destinations", {"reminders"})
    task.execute(run.context)
    (message,) = run.transport.sent
    assert message.headers == headers("Acme.Reminder, Acme.Messages", "airflow.results")
    text = page.read_text()
    assert {name for name in signature(headers).parameters if f"| `{name}` |" in text} == set(
        signature(headers).parameters
    )
    assert {name for name in headers(TYPE, "", "", "") if f"`{name}`" in text} == set(headers(TYPE, "", "", ""))
    for record in VECTORS:
        versions = json.loads((Path(__file__).parent / record).read_text())["versions"]
        assert f"tests/unit/{record}" in text
        assert [one for one in versions.values() if one not in text] == []


def transport(conn_type: str, **extra: str) -> RabbitMQTransport | SqsTransport:
    connection = Connection(conn_id="c", conn_type=conn_type, host="h", extra=extra)
    if conn_type == "aws":
        return SqsTransport.of(connection, clock=utcnow)
    return RabbitMQTransport("c", lambda: connection, clock=utcnow)


NSERVICEBUS = [
    ("rabbitmq_delayed", {"topology": "nservicebus"}),
    ("rabbitmq_delayed", {"topology": "nservicebus", "routing": "direct"}),
    ("aws", {"envelope": "nservicebus"}),
    ("aws", {"envelope": "nservicebus-unwrapped"}),
]


@pytest.mark.parametrize("conn_type, extra", NSERVICEBUS)
def test_a_message_without_a_type_is_warned_of_before_it_is_sent(run, log, monkeypatch, conn_type, extra) -> None:
    monkeypatch.setattr(run.transport, "receiver_warning", transport(conn_type, **extra).receiver_warning)
    assert run.execute(messages=rows(2))["sent"] == 2
    (line,) = (line for line in log.text.splitlines() if NO_TYPE in line)
    assert "warning" in line
    assert "error queue with MessageDeserializationException" in line
    assert run.ids()[0] in line
    run.execute(messages=rows(3), headers=headers(TYPE))
    assert log.text.count(NO_TYPE) == 1


@pytest.mark.parametrize(
    "conn_type, extra",
    [("rabbitmq_delayed", {}), ("aws", {}), ("aws", {"envelope": "raw"})],
)
def test_other_receivers_need_no_type(conn_type, extra) -> None:
    message = DelayedMessage(destination="q", body=b"", due_at=utcnow(), message_id="m")
    assert transport(conn_type, **extra).receiver_warning(message) is None
