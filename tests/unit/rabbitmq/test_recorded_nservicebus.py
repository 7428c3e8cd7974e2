"""Compared with what an NServiceBus endpoint declared and sent; its versions stand in nservicebus_rabbitmq.json."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from pika import BasicProperties

from airflow_delayed.message import DelayedMessage
from airflow_delayed.nservicebus import parse_nservicebus_time
from airflow_delayed.rabbitmq.declare import Binding, Exchange, Queue, plan
from airflow_delayed.rabbitmq.properties import MessagePropertiesWriter, ReceivedProperties
from airflow_delayed.rabbitmq.redrive import read_taken
from airflow_delayed.rabbitmq.topology import NSERVICEBUS, topology_of

RECORDED = json.loads(Path(__file__).with_name("nservicebus_rabbitmq.json").read_text())
UTC = timezone.utc
DELAY = "NServiceBus.Transport.RabbitMQ.DelayInSeconds"
DELAYED = [sent for sent in RECORDED["sent"] if DELAY in sent["properties"]["headers"]]
ids = [f"{sent['routing']} {sent['text']}" for sent in DELAYED]


@pytest.mark.parametrize("routing", ["conventional", "direct"])
def test_an_endpoint_declares_the_same_topology(routing: str) -> None:
    """Beside it, its installers make the error queue and bind it to no delays."""
    declared = RECORDED["declared"][routing]
    queues: dict[str, Any] = {}
    exchanges: dict[str, Any] = {}
    bindings = set()
    for part in plan(topology_of(NSERVICEBUS, routing), [declared["endpoint"]]):
        if isinstance(part, Queue):
            queues[part.name] = {"durable": True, "type": "quorum", "arguments": dict(part.arguments)}
        elif isinstance(part, Exchange):
            exchanges[part.name] = {"type": part.type, "durable": True, "arguments": dict(part.arguments)}
        else:
            assert isinstance(part, Binding)
            bindings.add(f"{part.source.name} -> {part.target} [{part.key}] {{}}")
    error = {"error"} if routing == "conventional" else set()
    assert queues == {name: part for name, part in declared["queues"].items() if name != "error"}
    assert exchanges == {name: part for name, part in declared["exchanges"].items() if name not in error}
    assert bindings == {text for text in declared["bindings"] if not text.startswith("error -> ")}
    assert len(declared["bindings"]) == len(bindings) + len(error)


def _received(sent: dict[str, Any]) -> ReceivedProperties:
    headers = {name: value for name, value in sent["properties"]["headers"].items() if not name.startswith("x-")}
    properties = {name: value for name, value in sent["properties"].items() if name != "headers"}
    return ReceivedProperties.of(BasicProperties(headers=headers, **properties))


@pytest.mark.parametrize("sent", DELAYED, ids=ids)
def test_each_message_that_waited_is_due(sent: dict[str, Any]) -> None:
    now = datetime(2026, 11, 22, 7, 18, tzinfo=UTC)
    found = read_taken(_received(sent), sent["routing_key"], b"", NSERVICEBUS.digits, now)
    assert (found.destination, found.due_at, found.problem) == ("airflow.results", now, None)


@pytest.mark.parametrize("sent", DELAYED, ids=ids)
def test_a_message_of_ours_with_an_endpoints_headers_has_the_endpoints_times(sent: dict[str, Any]) -> None:
    """The same due time in the same form, the same delay and the same AMQP properties."""
    theirs = sent["properties"]["headers"]
    own = {name: value for name, value in theirs.items() if not name.startswith("x-") and isinstance(value, str)}
    times = ("NServiceBus.DeliverAt", "NServiceBus.TimeSent")
    due, now = (parse_nservicebus_time(theirs[name]) for name in times)
    assert due is not None
    assert now is not None
    message = DelayedMessage(
        destination="airflow.results",
        body=sent["body"].encode(),
        due_at=due,
        message_id=sent["properties"]["message_id"],
        headers={name: value for name, value in own.items() if name not in times},
    )
    encoded = MessagePropertiesWriter("nservicebus").properties(message, now, theirs[DELAY])
    written = BasicProperties().decode(b"".join(encoded.encode()))
    assert {name: written.headers[name] for name in (*own, DELAY)} == {**own, DELAY: theirs[DELAY]}
    for name, value in sent["properties"].items():
        if name != "headers":
            assert getattr(written, name) == value
