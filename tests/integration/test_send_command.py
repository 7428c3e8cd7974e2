"""``airflow delayed send``: through each transport, with and without a store, until the message has arrived."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from support.commands import Command
from support.rabbitmq import VirtualHost, eventually, virtual_host
from support.stores import Store

from airflow_delayed.delivery import delivery_for
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.sqs import SqsDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook
from services import sqs

pytestmark = pytest.mark.long

#: Seconds for which a message is waited for that arrives.
PATIENCE = "120"
on_sqlite = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


@pytest.fixture
def broker(vhost: VirtualHost, connect: Callable[..., str]) -> VirtualHost:
    """The connection ``broker``, with the delay levels."""
    connect("broker", **vhost.connection)
    vhost.declare("orders")
    return vhost


@pytest.fixture
def queues(sqs_endpoint: str, connect: Callable[..., str]) -> SqsDelayHook:
    """The connection ``queues`` of SQS."""
    connect("queues", **sqs.connection(sqs_endpoint, queue_name_prefix=f"t{uuid4().hex[:8]}-"))
    return SqsDelayHook("queues")


@contextmanager
def dispatching(hook: DelayedStoreHook, *names: str, **policy: Any) -> Iterator[None]:
    """A dispatcher at work."""
    with closing(DelayedStoreHook(hook.conn_id, schema=hook.schema)) as store:
        dispatcher = store.dispatcher(names, lambda name, clock: delivery_for(name, clock=clock), **policy)
        thread = threading.Thread(target=dispatcher.run, args=("stopped",))
        thread.start()
        try:
            eventually(lambda: hook.dispatchers())
            yield
        finally:
            dispatcher.stop()
            thread.join()


def names_in(host: VirtualHost) -> set[str]:
    """The temporary queues and exchanges that are there."""
    names = [one["name"] for kind in ("queues", "exchanges") for one in host.manage("GET", f"{kind}/{{vhost}}")]
    return {name for name in names if "airflow-delayed-try" in name}


def test_a_message_is_sent(broker: VirtualHost, airflow_command: Command):
    words = ("send", "--conn-id", "broker", "--destination", "orders", "--value", "hello", "--header", "a=b=c")
    plan = airflow_command(*words, "--dry-run", "-o", "json")
    assert (plan.code, json.loads(plan.out)[0]["state"], broker.count("orders")) == (0, "would be sent", 0)
    done = airflow_command(*words, "--message-id", "m", "-o", "json")
    assert done.code == 0, done.err
    (row,) = json.loads(done.out)
    expected = {"message_id": "m", "destination": "orders", "conn_id": "broker", "store_conn_id": None, "state": "sent"}
    assert expected.items() <= row.items()
    (arrival,) = broker.collect("orders", enough=1)
    assert (arrival.message_id, arrival.body, arrival.properties.headers["a"]) == ("m", b"hello", "b=c")


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"topology": "nservicebus", "routing": "conventional"},
        {"topology": "nservicebus", "routing": "direct"},
        {"topology": "celery"},
    ],
    ids=lambda extra: " ".join(extra.values()) or "delayed",
)
@pytest.mark.parametrize("delay", ["0", "2"])
def test_it_arrives_through_rabbitmq(
    broker: VirtualHost, connect, airflow_command: Command, extra: dict[str, str], delay: str
):
    connect("other", **broker.connection_with(**extra))
    RabbitMQDelayHook("other").install([])
    done = airflow_command(
        "send", "--conn-id", "other", "--wait", "--delay", delay, "--timeout", PATIENCE, "-o", "json"
    )
    assert done.code == 0, done.err
    (row,) = json.loads(done.out)
    assert row["state"] == "arrived"
    assert 0 <= row["late_seconds"] < float(PATIENCE)
    eventually(lambda: names_in(broker) == set())


def test_it_arrives_through_sqs(queues: SqsDelayHook, airflow_command: Command):
    done = airflow_command("send", "--conn-id", "queues", "--wait", "--delay", "1", "--timeout", PATIENCE, "-o", "json")
    assert done.code == 0, done.err
    assert json.loads(done.out)[0]["late_seconds"] >= 0
    assert json.loads(done.out)[0]["destination"].startswith("airflow-delayed-try-")
    with closing(queues) as hook, pytest.raises(Exception, match="missing"):
        hook.life(json.loads(done.out)[0]["destination"])
    far = airflow_command("send", "--conn-id", "queues", "--wait", "--delay", "901")
    assert (far.code, far.out) == (1, "")
    assert "through queues a message is delayed by 0:14:30 at most" in far.err


def test_it_arrives_in_a_queue_table(store: Store, airflow_command: Command):
    hook = store.installed("q", deliver_conn_id=None)
    words = ["--schema", hook.schema] if hook.schema else []
    with dispatching(hook, hook.conn_id):
        done = airflow_command("send", "--conn-id", hook.conn_id, *words, "--wait", "--timeout", PATIENCE, "-o", "json")
    assert done.code == 0, done.err
    (row,) = json.loads(done.out)
    assert (row["state"], row["late_seconds"] >= 0) == ("arrived", True)
    # the table is dropped
    assert hook.verify([row["destination"]]).missing_destinations == (row["destination"],)


@on_sqlite
def test_it_arrives_through_store_and_dispatcher(broker: VirtualHost, store: Store, airflow_command: Command):
    hook = store.installed()
    words = ("send", "--conn-id", "broker", "--store-conn-id", hook.conn_id)
    with dispatching(hook, "broker"):
        done = airflow_command(*words, "--wait", "--delay", "1", "--timeout", PATIENCE, "--tag", "t", "-o", "json")
        assert done.code == 0, done.err
        (row,) = json.loads(done.out)
        assert (row["state"], row["store_conn_id"]) == ("arrived", hook.conn_id)
        assert f"stored {row['message_id']} to {row['destination']}" in done.err
        assert names_in(broker) == set()
        stored = airflow_command(
            *words, "--destination", "orders", "--delay", "9000", "--message-id", "m", "-o", "json"
        )
        assert json.loads(stored.out)[0]["state"] == "stored"
        again = airflow_command(
            *words, "--destination", "orders", "--due-at", str(hook.get("m").due_at), "--message-id", "m"
        )
        assert (again.code, "stored before" in again.out) == (0, True)


@on_sqlite
def test_without_a_dispatcher_it_says_so_and_takes_the_message_back(
    broker: VirtualHost, store: Store, airflow_command: Command
):
    hook = store.installed()
    words = ("send", "--conn-id", "broker", "--store-conn-id", hook.conn_id, "--message-id", "m")
    done = airflow_command(*words, "--wait", "--timeout", "0.5")
    assert (done.code, done.out) == (1, "")
    assert f"airflow delayed dispatcher --store-conn-id {hook.conn_id} --deliver-conn-ids broker" in done.err
    assert "no dispatcher has taken it from the store; none was at work within a day" in done.err
    assert f"airflow delayed doctor --conn-id {hook.conn_id} --conn-id broker" in done.err
    assert hook.get("m").state == "cancelled"
    assert names_in(broker) == set()


@on_sqlite
def test_what_is_given_up_ends_the_wait_with_the_reason(broker: VirtualHost, store: Store, airflow_command: Command):
    hook = store.installed()
    words = ("send", "--conn-id", "broker", "--store-conn-id", hook.conn_id, "--wait", "--timeout", PATIENCE)
    with dispatching(hook, "broker", allowed_destinations=["orders"]):
        done = airflow_command(*words)
    assert (done.code, done.out) == (1, "")
    assert "it does not arrive: it is failed: " in done.err
    assert "allowed_destinations" in done.err
    assert names_in(broker) == set()


def test_what_does_not_arrive_is_an_error(broker: VirtualHost, airflow_command: Command):
    # the time is up when it is due, and began before the broker had the message
    done = airflow_command("send", "--conn-id", "broker", "--wait", "--delay", "2", "--timeout", "0")
    assert done.code == 1
    assert "it has not arrived in time, though it was sent and confirmed" in done.err
    # it would be unroutable without its queue, which the broker deletes by itself
    (name,) = names_in(broker)
    assert f"queue {name} stays, because a message is on its way to it; RabbitMQ deletes it" in done.err
    (queue,) = [one for one in broker.manage("GET", "queues/{vhost}") if one["name"] == name]
    assert queue["arguments"]["x-expires"] == 62_000
    eventually(lambda: broker.count(name) == 1)
    assert broker.count("delayed.hex.unroutable") == 0


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT as in a terminal; what a shell runs in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@on_sqlite
@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_takes_it_back_and_removes_the_queue(
    broker: VirtualHost, store: Store, airflow_command: Command, number: signal.Signals
):
    hook = store.installed()
    handler = signal.getsignal(signal.SIGTERM)
    there: list[set[str]] = []

    def interrupt() -> None:
        eventually(lambda: hook.get("m"))
        there.append(names_in(broker))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    words = ("--store-conn-id", hook.conn_id, "--wait", "--message-id", "m", "--delay", "600")
    done = airflow_command("send", "--conn-id", "broker", *words)
    thread.join()
    assert (done.code, done.out, len(there[0])) == (128 + number, "", 1)
    assert hook.get("m").state == "cancelled"
    assert names_in(broker) == set()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_an_error_of_the_send_removes_the_queue(broker: VirtualHost, airflow_command: Command):
    done = airflow_command("send", "--conn-id", "broker", "--wait", "--header", "CC=x")
    assert (done.code, done.out) == (1, "")
    assert "'CC' is read by RabbitMQ itself" in done.err
    assert names_in(broker) == set()


#: What cannot be, and the error.
WRONG: list[tuple[list[str], str]] = [
    ([], "name --destination, or with --wait none"),
    (["--wait", "--destination", "orders"], "name --destination, or with --wait none"),
    (["--wait", "--dry-run"], "--wait sends a message; leave --dry-run out"),
    (["--wait", "--timeout", "-1"], "--timeout -1 is negative"),
    (["--destination", "orders", "--header", "nothing"], "--header 'nothing' is no header: write NAME=VALUE"),
    (["--destination", "orders", "--delay", "1", "--due-at", "2030-01-01T00:00Z"], "--due-at or --delay"),
    (["--destination", "orders", "--due-at", "2030-01-01T00:00"], "--due-at: "),
    (["--destination", "orders", "--delay", "-1"], "--delay: "),
    (["--destination", "orders", "--message-id", "a b"], "message_id: "),
    (["--destination", "gone"], "make it: airflow delayed install --conn-id broker --queue gone"),
    (["--destination", "orders", "--table", "x"], "'broker'"),
    (["--destination", "orders", "--store-conn-id", "nowhere"], "nowhere"),
]


def test_what_cannot_be_is_an_error_before_anything_is_sent(broker: VirtualHost, airflow_command: Command):
    for words, text in WRONG:
        done = airflow_command("send", "--conn-id", "broker", *words)
        assert (done.code, done.out) == (1, ""), words
        assert text in done.err
    assert broker.count("orders") == 0


def test_without_the_levels_it_says_what_to_install(rabbitmq_url: str, connect, airflow_command: Command):
    with virtual_host(rabbitmq_url) as host:
        connect("broker", **host.connection)
        done = airflow_command("send", "--conn-id", "broker", "--wait", "--delay", "5")
        assert (done.code, done.out) == (1, "")
        assert "connection 'broker' is not ready" in done.err
        assert names_in(host) == set()


@on_sqlite
def test_a_store_delivers_for_itself_alone(store: Store, connect, tmp_path: Path, airflow_command: Command):
    store.installed()
    done = airflow_command("send", "--conn-id", store.conn_id, "--store-conn-id", "another", "--destination", "q")
    assert (done.code, done.out) == (1, "")
    assert "stores its messages itself: leave --store-conn-id out" in done.err
