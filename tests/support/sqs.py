"""What the SQS tests share: a server with queues of the test's own, and a consumer."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import boto3
import pytest
from botocore.loaders import JSONFileLoader, Loader

from airflow_delayed.hooks.sqs import SqsDelayHook
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.sensors.fifo_cycle import FifoCycleSensor
from airflow_delayed.sqs.entries import DecodedMessage, decode
from services import sqs

#: The attribute with the seconds that a message in a delay queue still has to wait.
DELAY = "NServiceBus.AmazonSQS.DelaySeconds"


class _Remembering(JSONFileLoader):
    """Reads each of botocore's files once in this process: every hook has a session, which would read them again."""

    def load_file(self, file_path: str) -> Any:
        return _read(file_path)


@functools.cache
def _read(file_path: str) -> Any:
    return JSONFileLoader().load_file(file_path)


Loader.FILE_LOADER_CLASS = _Remembering


def grown(slept: list[float], *full: float) -> bool:
    """Whether these are the sleeps between tries, of which chance leaves up to half out."""
    return len(slept) == len(full) and all(most / 2 <= one <= most for one, most in zip(slept, full, strict=True))


@dataclass
class World:
    """An SQS, a connection to it, and a destination whose name no other test has."""

    url: str
    conn_id: str
    now: Callable[[], datetime] = utcnow
    destination: str = field(default_factory=lambda: f"orders.{uuid.uuid4().hex[:12]}")
    slept: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = boto3.client(
            "sqs",
            endpoint_url=self.url,
            region_name=sqs.REGION,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        self.hook = SqsDelayHook(self.conn_id, clock=self.now, sleep=self.slept.append)

    @property
    def queue(self) -> str:
        return self.destination.replace(".", "-")

    @property
    def fifo(self) -> str:
        return f"{self.queue}-delay.fifo"

    def install(self) -> World:
        self.hook.install([self.destination], create_destinations=True)
        return self

    def message(self, delay: float, message_id: str = "m1", **fields: Any) -> DelayedMessage:
        return DelayedMessage(
            **{
                "destination": self.destination,
                "body": f"body of {message_id}".encode(),
                "due_at": self.now() + timedelta(seconds=delay),
                "message_id": message_id,
                "headers": {"Kind": "reminder"},
                **fields,
            }
        )

    def url_of(self, name: str) -> str:
        return self.client.get_queue_url(QueueName=name)["QueueUrl"]

    def raw(self, name: str | None = None, *, delete: bool = True) -> list[Any]:
        """Receive all that is visible."""
        url, received = self.url_of(name or self.queue), []
        while batch := self.client.receive_message(
            QueueUrl=url, MaxNumberOfMessages=10, MessageAttributeNames=["All"], MessageSystemAttributeNames=["All"]
        ).get("Messages"):
            received += batch
            for message in batch if delete else ():
                self.client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        return received

    def arrived(self) -> list[DecodedMessage]:
        return [decode(message) for message in self.raw()]

    def ids(self) -> list[str]:
        return sorted(arrived.message_id for arrived in self.arrived())

    def attributes(self, name: str) -> dict[str, str]:
        return self.client.get_queue_attributes(QueueUrl=self.url_of(name), AttributeNames=["All"])["Attributes"]

    def counts(self, name: str) -> tuple[int, int, int]:
        """Visible, delayed, in flight."""
        found = self.attributes(name)
        names = ("", "Delayed", "NotVisible")
        return tuple(int(found[f"ApproximateNumberOfMessages{kind}"]) for kind in names)  # type: ignore[return-value]

    def on(self, event: str, handler: Callable[..., object]) -> None:
        """Call a handler at a botocore event of the hook's client, such as "before-call.sqs.SendMessageBatch"."""
        self.hook.get_conn().meta.events.register(event, handler)


@dataclass
class ClockedWorld(World):
    """One whose server's clock can be moved; the hook goes by the same clock."""

    server: sqs.Sqs = None  # type: ignore[assignment]

    def advance(self, seconds: float) -> None:
        self.server.advance(seconds)


def sensor_of(world: ClockedWorld, **fields: Any) -> FifoCycleSensor:
    """Return a sensor for the delay queue of a world's destination, which goes by the server's clock."""
    arguments = {"task_id": "cycle", "conn_id": world.conn_id, "destination": world.destination, "wait_time_seconds": 0}
    sensor = FifoCycleSensor(**{**arguments, **fields})
    sensor.hook = world.hook
    return sensor


@pytest.fixture(name="world")
def world_fixture(connect, sqs_endpoint: str) -> Iterator[World]:
    made = World(sqs_endpoint, connect("sqs_test", **sqs.connection(sqs_endpoint, unrestricted_delay=True)))
    yield made
    _remove(made)


@pytest.fixture(scope="session", name="clocked_server")
def clocked_server_fixture() -> Iterator[sqs.Sqs]:
    """A server of this process, whose clock can be moved, and whose queues can deny."""
    with sqs.running(policies=True) as server:
        yield server


@pytest.fixture(name="clocked")
def clocked_fixture(connect, clocked_server: sqs.Sqs) -> Iterator[ClockedWorld]:
    server = clocked_server
    conn_id = connect("sqs_clocked", **sqs.connection(server.url, unrestricted_delay=True))
    made = ClockedWorld(server.url, conn_id, now=server.now, server=server)
    yield made
    _remove(made)


def _remove(world: World) -> None:
    found = world.client.list_queues(QueueNamePrefix=world.queue)
    for url in found.get("QueueUrls", ()):
        world.client.delete_queue(QueueUrl=url)
    world.hook.close()
