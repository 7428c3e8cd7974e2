"""An endpoint that answers as NServiceBus's recorded endpoint did, and tasks that wait for its replies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred

from airflow_delayed.replies import Reply
from airflow_delayed.sensors.reply import ReplySensor
from airflow_delayed.triggers.reply import ReplyTrigger

SECONDS = 60
QUEUE = "airflow.results"
#: What a running endpoint sent as the reply to a message with this id.
RECORDED_ID = "ours-conventional-3"
RECORDED = next(
    sent
    for sent in json.loads(
        (Path(__file__).resolve().parents[1] / "unit/rabbitmq/nservicebus_rabbitmq.json").read_text()
    )["sent"]
    if sent["properties"].get("correlation_id") == RECORDED_ID
)


def reply_headers(message_id: str, reply_id: str) -> dict[str, str]:
    """The recorded reply's headers, as those of a reply to another message."""
    headers = {name: value for name, value in RECORDED["properties"]["headers"].items() if isinstance(value, str)}
    headers = {name: message_id if value == RECORDED_ID else value for name, value in headers.items()}
    return {**headers, "NServiceBus.MessageId": reply_id}


def text_of(reply: Reply) -> str:
    return f"{reply.message_id}: {reply.body.decode()}"


def sensor(message_id: str, conn_id: str, on_reply: Callable[[Reply], Any] = text_of, **options: Any) -> ReplySensor:
    return ReplySensor(
        **{
            "task_id": "wait",
            "conn_id": conn_id,
            "reply_to": QUEUE,
            "message_id": message_id,
            "on_reply": on_reply,
            "timeout": timedelta(seconds=SECONDS),
            **options,
        }
    )


class WaitingTask:
    """A task of its own run: it is deferred, its trigger runs in a triggerer of its own, and then it is resumed."""

    _pool = ThreadPoolExecutor(16)

    def __init__(self, task: ReplySensor) -> None:
        self.task = task
        with pytest.raises(TaskDeferred) as caught:
            task.execute({})
        self.deferred: TaskDeferred = caught.value
        self.fired: Future[Any] = Future()

    def start(self) -> WaitingTask:
        self.fired = self._pool.submit(asyncio.run, fired(self.deferred.trigger))
        return self

    def event(self) -> Any:
        """The payload of the trigger's event."""
        return self.fired.result(SECONDS)

    def resume(self) -> Any:
        """What the task returns."""
        return self.task.execute_complete({}, event=self.event(), **self.deferred.kwargs)


async def fired(trigger: Any) -> Any:
    """The payload of the event of a trigger that is made from its serialized form, as in a triggerer."""
    _, arguments = trigger.serialize()
    assert json.loads(json.dumps(arguments)) == arguments
    [event] = [event async for event in ReplyTrigger(**arguments).run()]
    return event.payload


def result(task: ReplySensor) -> Any:
    """Run a task to its end."""
    try:
        return task.execute({})
    except TaskDeferred as deferred:
        payload = asyncio.run(fired(deferred.trigger))
        return task.execute_complete({}, event=payload, **(deferred.kwargs or {}))


def wait(pipe: Connection, *, arguments: Mapping[str, Any]) -> None:
    """Run a trigger in a process of its own, to be killed; say so when it has begun, and its event."""
    pipe.send("begun")
    payload = asyncio.run(fired(ReplyTrigger(**arguments)))
    with suppress(OSError):
        pipe.send(payload)


def die_handling(pipe: Connection, *, message_id: str, conn_id: str, **options: Any) -> None:
    """Run a task whose worker is killed while it handles the reply; say which reply that was."""

    def on_reply(reply: Reply) -> None:
        pipe.send(text_of(reply))
        os.kill(os.getpid(), signal.SIGKILL)

    result(sensor(message_id, conn_id, on_reply, **options))
