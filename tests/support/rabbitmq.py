"""A virtual host of a test's own, what a consumer got, and RabbitMQ's management API."""

from __future__ import annotations

import base64
import json
import os
import time
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import cast
from urllib.parse import quote, unquote, urlsplit
from uuid import uuid4

import pika
from pika.adapters.blocking_connection import BlockingChannel

from airflow_delayed.delivery import Delivery
from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.message import DelayedMessage

UTC = timezone.utc
#: The header with the due time, ISO 8601 in UTC with microseconds.
DUE_AT = "airflow-delayed-due-at"
#: The header with the destination.
DESTINATION = "airflow-delayed-destination"


@dataclass(frozen=True)
class Arrival:
    message_id: str
    due_at: datetime
    received_at: datetime
    body: bytes
    properties: pika.BasicProperties


@dataclass(frozen=True)
class VirtualHost:
    url: str
    name: str

    @property
    def parameters(self) -> pika.URLParameters:
        parts = urlsplit(self.url)
        return pika.URLParameters(f"{parts.scheme}://{parts.netloc}/{quote(self.name, safe='')}")

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 5672

    @property
    def management_url(self) -> str:
        """Where its broker's management API is; without a login, for a hook asks as its own user."""
        return _without_login(management_url(self.url))

    @property
    def connection(self) -> dict[str, object]:
        """The fields of an Airflow connection; with the management API in the extra where a hook would not find it."""
        parts = urlsplit(self.url)
        login, password = _login(self.url)
        default = self.management_url == _default_management_url(self.url)
        return {
            "conn_type": "rabbitmq",
            "host": parts.hostname,
            "port": self.port,
            "login": login,
            "password": password,
            "schema": self.name,
            "extra": {} if default else {"management_url": self.management_url},
        }

    def connection_with(self, **extra: object) -> dict[str, object]:
        """The fields of an Airflow connection with more in its extra."""
        fields = self.connection
        return {**fields, "extra": {**cast("dict[str, object]", fields["extra"]), **extra}}

    @contextmanager
    def channel(self) -> Iterator[BlockingChannel]:
        with pika.BlockingConnection(self.parameters) as connection:
            yield connection.channel()

    def declare(self, *queues: str, **arguments: object) -> None:
        with self.channel() as channel:
            for queue in queues:
                channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum", **arguments})

    def count(self, queue: str) -> int:
        with self.channel() as channel:
            return channel.queue_declare(queue, passive=True).method.message_count

    def until(self, **counts: int) -> None:
        """Wait until queues hold so many messages; asks over one connection, for another one costs more than a look."""
        with self.channel() as channel:
            eventually(
                lambda: all(
                    channel.queue_declare(queue, passive=True).method.message_count == count
                    for queue, count in counts.items()
                )
            )

    def collect(
        self, *queues: str, enough: int | Collection[str], seconds: float = 60, more: float = 0.5
    ) -> list[Arrival]:
        """Consume until these ids, or so many different ones, have arrived or the time is up; then a little longer.

        What comes twice does not count twice, so that nothing is taken for lost that is still to come.
        """
        arrivals: list[Arrival] = []
        ids: set[str] = set()

        def complete() -> bool:
            return len(ids) >= enough if isinstance(enough, int) else ids.issuperset(enough)

        def take(channel: BlockingChannel, method: object, properties: pika.BasicProperties, body: bytes) -> None:
            now = datetime.now(UTC)
            due = datetime.fromisoformat(properties.headers[DUE_AT])
            arrivals.append(Arrival(properties.message_id or "", due, now, body, properties))
            ids.add(properties.message_id or "")
            channel.basic_ack(method.delivery_tag)

        with pika.BlockingConnection(self.parameters) as connection:
            channel = connection.channel()
            for queue in queues:
                channel.basic_consume(queue, take)
            deadline = time.monotonic() + seconds
            while not complete() and time.monotonic() < deadline:
                connection.process_data_events(time_limit=0.2)
            end = time.monotonic() + more
            while time.monotonic() < end:
                connection.process_data_events(time_limit=0.1)
        return arrivals

    def manage(self, method: str, path: str, body: object = None) -> object:
        return manage(self.url, method, path.replace("{vhost}", quote(self.name, safe="")), body)


def management_url(url: str) -> str:
    """Return where a broker's management API is: RABBITMQ_MANAGEMENT_URL tells it of the broker at RABBITMQ_URL."""
    configured = os.environ.get("RABBITMQ_MANAGEMENT_URL")
    if configured and url == os.environ.get("RABBITMQ_URL"):
        return configured.rstrip("/")
    return _default_management_url(url)


def _default_management_url(url: str) -> str:
    parts = urlsplit(url)
    return f"http://{parts.hostname}:{(parts.port or 5672) + 10_000}"


def _login(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return unquote(parts.username or "guest"), unquote(parts.password or "guest")


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def manage(url: str, method: str, path: str, body: object = None) -> object:
    """Call the management API of the broker at an AMQP URL."""
    base = management_url(url)
    request = urllib.request.Request(
        f"{_without_login(base)}/api/{path}", method=method, data=None if body is None else json.dumps(body).encode()
    )
    login = ":".join(_login(base if urlsplit(base).username else url)).encode()
    request.add_header("Authorization", "Basic " + base64.b64encode(login).decode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def make_virtual_host(url: str) -> VirtualHost:
    host = VirtualHost(url, f"test/{uuid4().hex[:12]}")
    host.manage("PUT", "vhosts/{vhost}")
    user = quote(_login(url)[0], safe="")
    host.manage("PUT", f"permissions/{{vhost}}/{user}", {"configure": ".*", "write": ".*", "read": ".*"})
    return host


@contextmanager
def virtual_host(url: str) -> Iterator[VirtualHost]:
    """A virtual host with nothing in it, until the block ends."""
    host = make_virtual_host(url)
    try:
        yield host
    finally:
        host.manage("DELETE", "vhosts/{vhost}")


def messages(
    destination: str, delays: Iterable[float], *, start: datetime | None = None, prefix: str = "m"
) -> list[DelayedMessage]:
    start = start or datetime.now(UTC)
    return [
        DelayedMessage(
            destination=destination,
            body=f"{prefix} {number}".encode(),
            due_at=start + timedelta(seconds=delay),
            message_id=f"{prefix}{number}",
        )
        for number, delay in enumerate(delays)
    ]


def install(hook: Delivery, destinations: Collection[str] = (), **options: bool) -> None:
    """Install levels for a test; a broker on a busy machine does not always form so many quorum queues in time."""
    for tries_left in (2, 1, 0):
        try:
            hook.install(destinations, **options)
            return
        except TransportUnavailable:
            if not tries_left:
                raise


def eventually(ready: Callable[[], object], seconds: float = 180) -> None:
    """Wait until it is ready; the longer it takes to ask, the longer the pauses."""
    deadline = time.monotonic() + seconds
    while True:
        asked = time.monotonic()
        if ready():
            return
        now = time.monotonic()
        assert now < deadline, "it did not come about in time"
        time.sleep(min(max(0.1, 2 * (now - asked)), 1))
