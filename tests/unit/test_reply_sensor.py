"""ReplySensor and its trigger, with a queue of replies in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowSensorTimeout, AirflowSkipException, TaskDeferred
from airflow.serialization.serialized_objects import DagSerialization
from support.times import by_clock

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.message import UTC
from airflow_delayed.replies import Reply, ReplyQueue, answered
from airflow_delayed.sensors import reply as sensors
from airflow_delayed.sensors.reply import ReplySensor
from airflow_delayed.testing.delayed import TaskRun
from airflow_delayed.triggers import reply as triggers
from airflow_delayed.triggers.reply import ReplyTrigger

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


class Queue(ReplyQueue):
    """Replies by the id of the message that they answer; a reply's key is its body."""

    def __init__(self) -> None:
        self.replies: dict[str, str] = {}
        #: What was called, and the ids of each look.
        self.calls: list[str] = []
        self.looks: list[set[str]] = []
        self.failures: list[Exception] = []

    def collect(self, ids: Collection[str]) -> dict[str, str]:
        self.looks.append({*ids})
        if self.failures:
            raise self.failures.pop()
        return {one: self.replies[one] for one in ids if one in self.replies}

    def collected(self, message_id: str) -> str | None:
        return self.replies.get(message_id)

    def read(self, message_id: str, key: str) -> Reply | None:
        if message_id not in self.replies:
            return None
        return Reply(message_id=key, answers=message_id, body=key.encode(), headers={})

    def remove(self, message_id: str, key: str) -> None:
        self.calls.append(f"remove {message_id}")
        del self.replies[message_id]

    def close(self) -> None:
        self.calls.append("close")


class Transport:
    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def replies(self, queue: str) -> Queue:
        assert queue == "results"
        return self.queue


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    for module in (sensors, triggers):
        monkeypatch.setattr(module, "delivery_for", lambda conn_id, schema=None: Transport(made))
    monkeypatch.setattr(triggers, "INTERVAL", 0.001)
    monkeypatch.setattr(triggers, "_FIRST_SLEEP", 0.001)
    return made


def sensor(now: datetime = NOW, **options: Any) -> ReplySensor:
    task = ReplySensor(
        **{
            "task_id": "wait",
            "conn_id": "c",
            "reply_to": "results",
            "message_id": "m1",
            "on_reply": lambda reply: reply.body.decode(),
            **options,
        }
    )
    return by_clock(task, lambda: now)


def test_a_reply_that_is_there_needs_no_wait(queue: Queue) -> None:
    queue.replies["m1"] = "yes"
    assert sensor().execute({}) == "yes"
    assert queue.calls == ["close", "remove m1", "close"]


def test_it_waits_in_the_triggerer_until_its_timeout(queue: Queue) -> None:
    with pytest.raises(TaskDeferred) as caught:
        sensor(timeout=timedelta(hours=1), schema="s").execute({})
    _, arguments = caught.value.trigger.serialize()
    until = (NOW + timedelta(hours=1)).isoformat()
    assert arguments == {"conn_id": "c", "queue": "results", "message_id": "m1", "until": until, "schema": "s"}
    assert (caught.value.method_name, caught.value.kwargs) == ("execute_complete", {"until": until})
    # another process has taken the reply meanwhile: it waits on, and not longer
    with pytest.raises(TaskDeferred) as again:
        sensor(NOW + timedelta(minutes=59)).execute_complete({}, {"reply": "yes"}, until)
    assert again.value.kwargs == {"until": until}


def test_when_the_time_is_up_it_looks_once_more(queue: Queue) -> None:
    past = (NOW - timedelta(seconds=1)).isoformat()
    with pytest.raises(AirflowSensorTimeout, match="no reply to message m1 came into queue 'results' within 1:00:00"):
        sensor(timeout=timedelta(hours=1)).execute_complete({}, {"reply": None}, past)
    queue.replies["m1"] = "just in time"
    assert sensor().execute_complete({}, {"reply": None}, past) == "just in time"
    arguments = {"event": {"reply": None}, "until": past}
    with pytest.raises(AirflowSkipException):
        sensor(soft_fail=True).resume_execution("execute_complete", arguments, {})


def test_a_dag_with_it_is_serialized_and_its_templates_are_rendered(queue: Queue) -> None:
    with DAG("d", schedule=None) as dag:
        task = sensor(message_id="{{ ti.xcom_pull('ask')['message_ids'][0] }}", reply_to="{{ params.queue }}")
    DagSerialization.to_dict(dag)
    queue.replies["m7"] = "seven"
    run = TaskRun(task, NOW, run_id="r", params={"queue": "results"}, xcoms={"ask": {"message_ids": ["m7"]}})
    assert run.execute() == "seven"


def test_the_triggers_of_one_queue_look_together_through_each_failure(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    until = datetime.max.replace(tzinfo=UTC)
    queue.failures = [TransportUnavailable("the broker is away"), ValueError("a secret")]

    async def fired(message_id: str, until: datetime) -> Any:
        [event] = [event async for event in ReplyTrigger("c", "results", message_id, until).run()]
        return event.payload

    async def run() -> list[Any]:
        waits = [asyncio.create_task(fired(f"m{number}", until)) for number in range(3)]
        while not any(len(look) == 3 for look in queue.looks[2:]):
            await asyncio.sleep(0.001)
        queue.replies["m1"] = "yes"
        assert await waits[1] == {"reply": "yes"}
        waits[2].cancel()
        count = len(queue.looks)
        while queue.looks[count:] == [] or queue.looks[-1] != {"m0"}:
            await asyncio.sleep(0.001)
        queue.replies["m0"] = "no"
        # a trigger whose time is up fires without a look
        return [await waits[0], await fired("m9", NOW)]

    assert asyncio.run(run()) == [{"reply": "no"}, {"reply": None}]
    problems = [text for text in caplog.messages if "cannot look" in text]
    # each in the log of its task
    assert problems == [
        *3 * ["cannot look for replies in queue 'results': ValueError. Still trying"],
        *3 * ["cannot look for replies in queue 'results': the broker is away. Still trying"],
    ]
    assert queue.calls[-1] == "close"


@pytest.mark.parametrize(
    ("headers", "correlation_id", "expected"),
    [
        ({"NServiceBus.RelatedTo": "m1"}, None, "m1"),
        ({"NServiceBus.RelatedTo": "m2", "NServiceBus.CorrelationId": "m1"}, "of-the-conversation", "m1"),
        ({"NServiceBus.RelatedTo": ["m1"], "NServiceBus.CorrelationId": 7}, "m1", "m1"),
        ({"NServiceBus.RelatedTo": "M1", "NServiceBus.CorrelationId": "m1 "}, "m", None),
        ({}, None, None),
    ],
)
def test_which_message_a_reply_answers(headers: dict[str, Any], correlation_id: str | None, expected: str | None):
    assert answered(headers, correlation_id, {"m1"}) == expected
