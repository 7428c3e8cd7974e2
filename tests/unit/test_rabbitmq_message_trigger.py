from __future__ import annotations

import asyncio
import importlib.util
import sys
from types import SimpleNamespace

import pytest
from airflow.exceptions import AirflowOptionalProviderFeatureException
from airflow.models.trigger import Trigger
from airflow.triggers.base import BaseEventTrigger
from airflow.triggers.shared_stream import AdvanceItem, AdvanceOutcome
from support.watching import number

from airflow_delayed import compat
from airflow_delayed.triggers import message_stream
from airflow_delayed.triggers.rabbitmq_message import MessageEvent, RabbitMQMessageProducer, RabbitMQMessageTrigger

PATH = "airflow_delayed.triggers.rabbitmq_message.RabbitMQMessageTrigger"
ARGUMENTS = {"conn_id": "c", "queue": "q", "prefetch": 7, "pause": 2.5, "body": True, "body_limit": 9}


def test_arguments_are_stored_and_read_back():
    stored = RabbitMQMessageTrigger(**Trigger._decrypt_kwargs(Trigger.encrypt_kwargs(ARGUMENTS)))
    assert stored.serialize() == (PATH, ARGUMENTS)
    plain = RabbitMQMessageTrigger("c", "q")
    # so that a watcher is the same one when there are more arguments
    assert plain.serialize() == (PATH, {"conn_id": "c", "queue": "q"})
    assert RabbitMQMessageTrigger(**plain.serialize()[1]).serialize() == plain.serialize()


def test_airflow_takes_watchers_given_alike_for_one():
    assert number(RabbitMQMessageTrigger("c", "q")) == number(RabbitMQMessageTrigger("c", "q", prefetch=100))
    assert number(RabbitMQMessageTrigger("c", "q")) != number(RabbitMQMessageTrigger("c", "q", body=True))


def test_the_queue_of_triggerers_is_not_rabbitmqs(monkeypatch):
    # from 3.4 on Airflow reads this attribute of a watcher's trigger
    assert getattr(RabbitMQMessageTrigger("c", "orders"), "queue", None) is None
    monkeypatch.setattr(compat, "TRIGGERER_QUEUES", False)
    with pytest.raises(ValueError, match=r"triggerer_queue= needs Airflow 3\.4"):
        RabbitMQMessageTrigger("c", "orders", triggerer_queue="near the broker")
    seen = {}
    monkeypatch.setattr(compat, "TRIGGERER_QUEUES", True)
    monkeypatch.setattr(BaseEventTrigger, "__init__", lambda self, **options: seen.update(options))
    trigger = RabbitMQMessageTrigger("c", "orders", triggerer_queue="near the broker")
    assert seen == {"queue": "near the broker"}
    assert trigger.serialize()[1] == {"conn_id": "c", "queue": "orders", "triggerer_queue": "near the broker"}


def test_a_stream_is_shared_by_connection_and_queue():
    keys = [
        RabbitMQMessageTrigger(*arguments).shared_stream_key()
        for arguments in [("c", "q"), ("c", "q", 3), ("c", "r"), ("d", "q")]
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ({"conn_id": ""}, "conn_id and queue must not be empty"),
        ({"queue": ""}, "conn_id and queue must not be empty"),
        ({"prefetch": 0}, "prefetch=0 must be 1 to 500"),
        ({"prefetch": 501}, "prefetch=501 must be 1 to 500"),
        ({"pause": -1}, "pause=-1 must be 0 to 60 seconds"),
        ({"pause": 61}, "pause=61 must be 0 to 60 seconds"),
        ({"body_limit": -1}, "body_limit=-1 must be 0 to 1048576 bytes"),
        ({"body_limit": 1_048_577}, "body_limit=1048577 must be 0 to 1048576 bytes"),
    ],
)
def test_a_wrong_argument_is_named_when_the_dag_is_parsed(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        RabbitMQMessageTrigger(**{"conn_id": "c", "queue": "q", **arguments})


def test_an_event_does_not_show_its_body():
    messages = [{"message_id": "m", "body": "secret"}, {"message_id": None, "body_base64": "secret"}]
    event = MessageEvent(payload={"queue": "q", "messages": messages})
    assert repr(event) == str(event) == "MessageEvent<2 of queue 'q': m, None>"


def test_a_task_cannot_be_deferred_to_it():
    async def run() -> None:
        async for _ in RabbitMQMessageTrigger("c", "q").run():
            pass

    with pytest.raises(NotImplementedError, match="for an AssetWatcher"):
        asyncio.run(run())


class Consumer:
    """Has one batch, and notes what becomes of its messages."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.again: list[str] = []

    async def batches(self):
        yield ["message"]


@pytest.mark.parametrize("leaves", [False, True], ids=["it stays", "it leaves before it makes the event"])
def test_a_message_is_acknowledged_only_when_a_subscriber_has_made_its_event(monkeypatch, leaves):
    consumer = Consumer()
    settled = SimpleNamespace(
        batches=consumer.batches, done=consumer.done.append, again=consumer.again.append, reject=None
    )
    producer = RabbitMQMessageProducer(settled, pause=0)
    trigger = RabbitMQMessageTrigger("c", "q")
    monkeypatch.setattr(trigger, "_payload", lambda found: {"message_id": found})

    async def play() -> None:
        stream = producer.open_stream()
        batch, payload = await anext(stream)

        async def shared():
            yield batch

        if not leaves:
            await anext(trigger.filter_shared_stream(shared()))
        # Airflow counts a subscriber that has left as one that accepted what it had
        await producer.advance([AdvanceItem(payload, AdvanceOutcome(acked=1, failed=0))])
        await stream.aclose()

    asyncio.run(play())
    assert (consumer.done, consumer.again) == (([], ["message"]) if leaves else (["message"], []))


def test_before_airflow_3_3_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "airflow.triggers.shared_stream", None)
    # a copy, so that the module stays as others have it
    spec = importlib.util.spec_from_file_location("copy", message_stream.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(AirflowOptionalProviderFeatureException, match=r"needs Airflow 3\.3 or later"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
