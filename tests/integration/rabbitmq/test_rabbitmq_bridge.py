"""The bridge for services that go on publishing with the header x-delay, on a real broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from random import Random
from uuid import uuid4

import pika
import pytest
from support.bridging import KEYS, bridge, consumers_exchange, publish, running, take
from support.forked import Child
from support.lengths import length
from support.rabbitmq import VirtualHost, eventually

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.rabbitmq.bridge import BridgeNotReady
from airflow_delayed.rabbitmq.relay import RELAY_WINDOW

pytestmark = pytest.mark.long

UTC = timezone.utc
KILLS = length("kills of a bridge", 3, 20)


def test_a_message_arrives_as_it_was_published(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    consumers_exchange(vhost, "topic", mine="order.*", other="invoice.*", copies="copy")
    made = hook.bridge("services", "orders")
    assert made.install().ok
    body = bytes(range(256)) * 8000
    properties = {
        "content_type": "application/json",
        "content_encoding": "gzip",
        "delivery_mode": 1,
        "priority": 3,
        "correlation_id": "c",
        "reply_to": "r",
        "expiration": "60000",
        "message_id": "the id",
        "timestamp": 1_700_000_000,
        "type": "t",
        "app_id": "a",
        "cluster_id": "cl",
        "headers": {"text": "ü", "number": 7, "table": {"inner": [1, "two", True]}, "nothing": None, "CC": ["copy"]},
    }
    before = datetime.now(UTC)
    publish(vhost, "order.new", body, 1500, **properties)
    with running(made):
        method, found, arrived = take(vhost, "mine")
    assert (datetime.now(UTC) - before).total_seconds() >= 1.5
    assert (method.exchange, method.routing_key, arrived) == ("orders", "order.new", body)
    headers = properties.pop("headers")
    # as the plugin leaves it
    assert found.headers == {**headers, "x-delay": -1500}
    assert {name: getattr(found, name) for name in properties} == properties
    assert vhost.count("copies") == 1
    assert vhost.count("other") == 0
    assert str(made.counts) == "1 delayed, 1 delivered, 0 parked"


@pytest.mark.parametrize("kind", ["fanout", "direct", "topic"])
def test_the_targets_type_routes(hook: RabbitMQDelayHook, vhost: VirtualHost, kind: str) -> None:
    consumers_exchange(vhost, kind, one="a", two="b")
    made = hook.bridge("services", "orders", type="fanout" if kind == "fanout" else "topic")
    made.install()
    with running(made):
        publish(vhost, "a", b"1", 1)
        publish(vhost, "b", b"2")
        vhost.until(**({"one": 2, "two": 2} if kind == "fanout" else {"one": 1, "two": 1}))


@pytest.mark.parametrize("delay", [None, 0, -5000, "-1", "0"])
def test_without_a_delay_at_once(hook: RabbitMQDelayHook, vhost: VirtualHost, delay: object) -> None:
    consumers_exchange(vhost, "topic", mine="#")
    made = hook.bridge("services", "orders")
    made.install()
    publish(vhost, "k", b"now", delay)
    with running(made):
        _, found, _ = take(vhost, "mine")
    assert (found.headers or {}) == ({} if delay is None else {"x-delay": delay})
    assert str(made.counts) == "0 delayed, 1 delivered, 0 parked"


def test_what_cannot_go_on_is_parked_and_can_be_redriven(
    hook: RabbitMQDelayHook, vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    consumers_exchange(vhost, "direct", mine="bound")
    made = hook.bridge("services", "orders")
    made.install()
    publish(vhost, "bound", b"malformed", "soon", message_id="m1")
    publish(vhost, "unbound", b"unroutable", 1000, message_id="m2", headers={"h": "v"})
    publish(vhost, "bound", b"endless", 10**15, message_id="m3")
    with vhost.channel() as channel:
        channel.basic_publish("", "delayed.bridge.services.due", b"foreign")
    with running(made):
        vhost.until(**{"delayed.bridge.services.parked": 4})
    assert (
        "bridge from exchange 'services' to 'orders': parked in queue 'delayed.bridge.services.parked'" in caplog.text
    )
    assert "x-delay: it is not a whole number of milliseconds" in caplog.text
    assert "soon" not in caplog.text
    assert "NO_ROUTE by exchange 'orders' with key 'unbound'" in caplog.text
    assert "by another way than through this bridge" in caplog.text
    (finding,) = [each for each in made.verify() if each.code == "bridge-parked"]
    assert (finding.severity, finding.what) == ("warning", "4 messages could not go on")
    command = f"airflow delayed bridge --conn-id {hook.conn_id} --exchange services --target orders --redrive"
    assert str(finding.remedy).endswith(command)
    with vhost.channel() as channel:
        channel.queue_bind("mine", "orders", "unbound")
    assert made.redrive() == 3
    with running(made):
        vhost.until(mine=2, **{"delayed.bridge.services.parked": 2})
    arrived = {}
    for _ in range(2):
        method, found, body = take(vhost, "mine")
        arrived[body] = method.routing_key, found.message_id, found.headers
    assert arrived == {
        b"malformed": ("bound", "m1", {"x-delay": "soon"}),
        b"unroutable": ("unbound", "m2", {"h": "v", "x-delay": -1000}),
    }
    reasons = {body: found.headers["airflow-delayed-set-aside-reason"] for body, found in parked(vhost)}
    assert sorted(reasons) == [b"endless", b"foreign"]
    assert "delay" in reasons[b"endless"]
    assert "by another way than through this bridge" in reasons[b"foreign"]


def parked(vhost: VirtualHost) -> Iterator[tuple[bytes, pika.BasicProperties]]:
    with vhost.channel() as channel:
        while (taken := channel.basic_get("delayed.bridge.services.parked", auto_ack=True))[0]:
            yield taken[2], taken[1]


def test_what_expires_while_no_bridge_runs_is_parked(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    consumers_exchange(vhost, "topic", mine="#")
    made = hook.bridge("services", "orders")
    made.install()
    publish(vhost, "k", b"short", 1000, expiration="1")
    vhost.until(**{"delayed.bridge.services.parked": 1})
    assert made.redrive() == 0
    ((body, found),) = parked(vhost)
    assert (body, found.headers["x-first-death-reason"]) == (b"short", "expired")


def test_a_full_queue_parks_what_it_refuses(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    with vhost.channel() as channel:
        full = {"x-max-length": 1, "x-overflow": "reject-publish", "x-queue-type": "classic"}
        channel.queue_declare("mine", durable=True, arguments=full)
        channel.exchange_declare("orders", "fanout", durable=True)
        channel.queue_bind("mine", "orders")
    made = hook.bridge("services", "orders")
    made.install()
    for number in range(5):
        publish(vhost, "k", b"%d" % number)
    with running(made):
        eventually(lambda: made.counts.delivered + made.counts.parked == 5)
    assert made.counts.parked == vhost.count("delayed.bridge.services.parked") == 4
    assert all("is a queue full" in found.headers["airflow-delayed-set-aside-reason"] for _, found in parked(vhost))


def test_a_target_that_goes_and_comes_back(
    hook: RabbitMQDelayHook, vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    consumers_exchange(vhost, "topic", mine="#")
    made = hook.bridge("services", "orders")
    made.install()
    with running(made):
        publish(vhost, "k", b"1")
        vhost.until(mine=1)
        with vhost.channel() as channel:
            channel.exchange_delete("orders")
        publish(vhost, "k", b"2")
        eventually(lambda: "no exchange 'orders'" in caplog.text)
        with vhost.channel() as channel:
            channel.exchange_declare("orders", "topic", durable=True)
            channel.queue_bind("mine", "orders", "#")
        vhost.until(mine=2)


def test_install_and_verify_name_what_is_wrong(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    made = hook.bridge("services", "orders")
    (missing,) = made.install(dry_run=True).problems
    assert (
        str(missing) == "exchange orders: missing. What to do: declare it, with the bindings of the consumers' queues"
    )
    with pytest.raises(BridgeNotReady, match="exchange orders: missing"):
        made.install()
    consumers_exchange(vhost, "topic", mine="#")
    with vhost.channel() as channel:
        channel.exchange_declare("services", "headers", durable=True)
    with pytest.raises(BridgeNotReady, match=r"wanted 'topic', found 'headers'.*another name"):
        made.install()
    with vhost.channel() as channel:
        channel.exchange_delete("services")
    assert made.install().ok
    made.require()
    with vhost.channel() as channel:
        channel.queue_bind("mine", "services", "#")
        channel.exchange_bind("services", "orders", "#")
    found = {each.code: each for each in made.verify() if each.code and each.severity != "unknown"}
    assert {code: each.severity for code, each in found.items()} == {
        "bridge-loop": "error",
        "bridge-undelayed": "warning",
    }
    with pytest.raises(BridgeNotReady, match="leads back to exchange services"):
        made.require()


def test_what_makes_no_bridge(hook: RabbitMQDelayHook) -> None:
    with pytest.raises(ValueError, match="would come back to the bridge"):
        hook.bridge("orders", "orders")
    with pytest.raises(ValueError, match="no binding for every routing key"):
        hook.bridge("services", "orders", type="direct")
    for keys in ([], ["short"], [*KEYS, "short"]):
        with pytest.raises(ValueError, match=r"32 characters or more in \[delayed\] bridge_keys"):
            hook.bridge("services", "orders", secrets=keys)


def test_the_command_installs_and_stays_until_sigterm(
    hook: RabbitMQDelayHook,
    vhost: VirtualHost,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What ends by itself is called in this process, from the parser on; what stays is the real program."""
    from airflow.cli import cli_parser

    consumers_exchange(vhost, "topic", mine="#")
    words = ["delayed", "bridge", "--conn-id", hook.conn_id, "--exchange", "services", "--target", "orders"]
    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "server")

    def printed(*options: str) -> str:
        args = cli_parser.get_parser().parse_args([*words, *options])
        args.func(args)
        return capsys.readouterr().out

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match=r"queue delayed\.bridge\.services\.intake: missing"):
            printed()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "queue delayed.bridge.services.intake: would create" in printed("--install", "--dry-run")
    assert "queue delayed.bridge.services.intake: created" in printed("--install")
    assert "ready: " in printed("--dry-run")
    publish(vhost, "k", b"1", 1)
    program = [sys.executable, "-m", "airflow", *words]
    env = {**os.environ, "PYTHONPATH": str(here)}
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        try:
            vhost.until(mine=1)
            began = time.monotonic()
            process.terminate()
            log, _ = process.communicate(timeout=60)
            seconds = time.monotonic() - began
        finally:
            process.kill()
    assert process.returncode == 0, log
    assert "bridge from exchange 'services' to 'orders' has ended: 1 delayed, 1 delivered, 0 parked" in log
    assert "connects again" not in log
    print(f"ended {seconds:.1f} s after SIGTERM")
    assert "0 messages sent on" in printed("--redrive")


def test_a_bridge_that_is_killed_again_and_again(vhost: VirtualHost, hook: RabbitMQDelayHook) -> None:
    """Sent, arrived, twice, lost and early are counted."""
    consumers_exchange(vhost, "topic", mine="#")
    hook.bridge("services", "orders").install()
    random, many = Random(20), 300 * KILLS
    delays = {str(uuid4()): random.choice([0, *(random.randint(1, 4000) for _ in range(4))]) for _ in range(many)}
    due, arrived, early = {}, Counter(), []
    done = threading.Event()

    def serve() -> None:
        with vhost.channel() as channel:
            channel.confirm_delivery()
            for message_id, delay in delays.items():
                sent = pika.BasicProperties(message_id=message_id, headers={"x-delay": delay}, delivery_mode=2)
                due[message_id] = time.time() + delay / 1000
                channel.basic_publish("services", "order.new", message_id.encode(), sent, mandatory=True)

    def consume() -> None:
        with vhost.channel() as channel:
            for method, found, body in channel.consume("mine", inactivity_timeout=0.2):
                if method is None:
                    if done.is_set():
                        return
                    continue
                if time.time() < due[found.message_id] or body.decode() != found.message_id:
                    early.append(found.message_id)
                arrived[found.message_id] += 1
                channel.basic_ack(method.delivery_tag)

    threads = [threading.Thread(target=work) for work in (serve, consume)]
    for thread in threads:
        thread.start()
    arguments = {"fields": vhost.connection, "exchange": "services", "target": "orders"}
    try:
        for _ in range(KILLS):
            child = Child(bridge, **arguments)
            assert child.answer() == "runs"
            before = len(arrived)
            # in the middle of its work, or before its first message
            eventually(lambda before=before: len(arrived) > before or len(arrived) == many)
            time.sleep(random.uniform(0, 0.2))
            child.close()
        last = Child(bridge, **arguments)
        threads[0].join()
        eventually(lambda: len(arrived) == many, 300)
    finally:
        done.set()
        threads[1].join()
    last.close()
    twice = sum(arrived.values()) - len(arrived)
    print(f"killed {KILLS} times: sent {many}, arrived {len(arrived)}, twice {twice}, early {len(early)}")
    assert (set(arrived), early) == (set(delays), [])
    # what was taken from the two queues and not acknowledged
    assert twice <= KILLS * 2 * RELAY_WINDOW
    with vhost.channel() as channel:
        for queue in ("intake", "due", "parked"):
            assert channel.queue_declare(f"delayed.bridge.services.{queue}", passive=True).method.message_count == 0
