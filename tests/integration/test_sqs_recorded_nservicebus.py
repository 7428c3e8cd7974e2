"""Delay queues with the requests of an NServiceBus endpoint, as recorded in tests/unit/sqs/nservicebus_sqs.json."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.sqs import DELAY, ClockedWorld

from airflow_delayed.nservicebus import DELIVER_AT, nservicebus_time
from airflow_delayed.sqs.entries import decode

RECORDED = json.loads((Path(__file__).parents[1] / "unit" / "sqs" / "nservicebus_sqs.json").read_text())
REQUESTS = [*RECORDED["requests"], *RECORDED["bodies_in_s3"]["requests"]]
DELAYED = [sent for sent in REQUESTS if DELAY in sent["entry"]["MessageAttributes"]]
ids = [
    f"{sent['entry']['MessageAttributes'][DELAY]['StringValue']} s,{' envelope,' if sent['wrapped'] else ''}"
    f"{' S3' if 'S3BodyKey' in sent['entry']['MessageAttributes'] else ''}"
    for sent in DELAYED
]


def due_again(entry: dict[str, Any], due_at: datetime) -> dict[str, Any]:
    """Return the request with another due time: that of the record is past."""
    recorded = decode({"Body": entry["MessageBody"], "MessageAttributes": entry["MessageAttributes"], "MessageId": "i"})
    text = json.dumps(entry)
    assert text.count(recorded.headers[DELIVER_AT]) == 1
    made: dict[str, Any] = json.loads(text.replace(recorded.headers[DELIVER_AT], nservicebus_time(due_at)))
    return {name: made[name] for name in made if name not in ("Id", "DelaySeconds")}


@pytest.mark.parametrize("sent", DELAYED, ids=ids)
def test_an_endpoints_message_is_due_when_its_header_says(clocked: ClockedWorld, sent: dict[str, Any]) -> None:
    clocked.install()
    delay = int(sent["entry"]["MessageAttributes"][DELAY]["StringValue"])
    # an endpoint rounds the delay up; the request may be on its way for most of that second
    due_at = clocked.now() + timedelta(seconds=delay - 0.05)
    entry = due_again(sent["entry"], due_at)
    clocked.client.send_message(QueueUrl=clocked.url_of(clocked.fifo), **entry)
    while not (arrived := clocked.raw()):
        assert clocked.now() < due_at + timedelta(seconds=960)
        clocked.advance(905 if due_at - clocked.now() > timedelta(seconds=910) else 5)
        clocked.hook.cycle(clocked.destination)
    assert clocked.now() >= due_at
    (only,) = arrived
    message = decode(only)
    # written in the first round that does not deliver
    assert message.due_at == (due_at if delay > 900 else None)
    assert message.headers[DELIVER_AT] == nservicebus_time(due_at)
    # the sensor adds the due time in its own form, and takes the delay out; all else arrives as it was sent
    attributes = {name: value["StringValue"] for name, value in only["MessageAttributes"].items()}
    attributes.pop("AirflowDelayed.DueAt", None)
    expected = {name: value["StringValue"] for name, value in entry["MessageAttributes"].items() if name != DELAY}
    assert (only["Body"], attributes) == (entry["MessageBody"], expected)
    assert clocked.ids() == []


@pytest.mark.parametrize("seconds", [-10, 4], ids=["before", "after"])
def test_a_header_of_another_delivery_does_not_count(clocked: ClockedWorld, seconds: float) -> None:
    """Such as on a delayed retry, which has the header of the first delivery."""
    clocked.install()
    (sent,) = (one for one, name in zip(DELAYED, ids, strict=True) if name == "1925 s, envelope,")
    start = clocked.now()
    entry = due_again(sent["entry"], start + timedelta(seconds=1925 + seconds))
    clocked.client.send_message(QueueUrl=clocked.url_of(clocked.fifo), **entry)
    for _ in range(2):
        clocked.advance(905)
        clocked.hook.cycle(clocked.destination)
    clocked.advance(200)
    (message,) = clocked.arrived()
    assert message.due_at is not None
    assert timedelta() <= message.due_at - start - timedelta(seconds=1925) < timedelta(seconds=3)
