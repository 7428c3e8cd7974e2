"""The code of RabbitMQ's how-to pages is run as it stands, block after block, on a virtual host of its own."""

from __future__ import annotations

import ast
import contextlib
import io
import logging
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pika import BasicProperties
from support.examples import note_dags
from support.rabbitmq import VirtualHost, eventually

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.rabbitmq.topology import DELAYED

pytestmark = pytest.mark.long

#: A block of code and, if one follows right behind, what it prints.
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00")
Connect = Callable[..., str]


@pytest.fixture
def vhost(vhost: VirtualHost, connect: Connect) -> VirtualHost:
    connect("rabbitmq_default", **vhost.connection)
    return vhost


@pytest.fixture
def run_page(here: Path, vhost: VirtualHost, run_dag: Callable[..., Any]) -> Callable[[str], None]:
    def run(name: str) -> None:
        names: dict[str, Any] = {"parameters": vhost.parameters}
        for code, expected in BLOCK.findall((here / "docs" / "rabbitmq" / f"{name}.md").read_text()):
            code = code.replace('pika.URLParameters("amqp://guest:guest@localhost:5672/%2F")', "parameters")
            if "with DAG(" in code:
                run_dags(code, run_dag)
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                for statement in ast.parse(code).body:
                    if re.search(r"hook\.(waiting|verify)\(", ast.unparse(statement)):
                        # the broker makes statistics of new queues every few seconds
                        eventually(lambda: RabbitMQDelayHook("rabbitmq_default").waiting().stuck is not None)
                    exec(ast.unparse(statement), names)
            if expected:
                assert TIME.sub("<time>", printed.getvalue()) == TIME.sub("<time>", expected)

    return run


def run_dags(code: str, run_dag: Callable[..., Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        made = note_dags(patch)
        exec(code, {})
    assert made
    for dag in made:
        assert {ti.state for ti in run_dag(dag).get_task_instances()} == {"success"}


@pytest.mark.usefixtures("empty_vhost")
def test_install(run_page: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    run_page("install")
    log = capsys.readouterr().out
    assert "545 would create (binding: 429, queue: 107, exchange: 9; for orders)" in log
    # as the page shows it
    assert "rabbitmq_default: 545 created (binding: 429, queue: 107, exchange: 9; for orders)" in log
    # pika's own lines would be more than ours
    assert "[pika." not in log


def test_send(run_page: Callable[[str], None], vhost: VirtualHost, caplog: pytest.LogCaptureFixture) -> None:
    run_page("send")
    # what a send asks the broker, and is refused as expected, is no warning
    warnings = [
        record for record in caplog.records if record.name.startswith("pika") and record.levelno >= logging.WARNING
    ]
    assert [record.getMessage() for record in warnings] == []
    # of four that arrived one waits for another hour
    vhost.until(orders=3, **{"delayed.hex.0000e00": 1})


def test_verify(run_page: Callable[[str], None]) -> None:
    run_page("verify")


def test_uris_of_connections(here: Path, connect: Connect) -> None:
    from airflow.sdk import Connection

    from airflow_delayed.rabbitmq.connection import parameters

    found = {}
    text = (here / "docs" / "rabbitmq" / "install.md").read_text()
    for name, uri in re.findall(r"^export AIRFLOW_CONN_(\w+)='(.*)'$", text, re.MULTILINE):
        conn_id = connect(name.lower(), uri)
        fields = Connection.get(conn_id)
        hosts = parameters(
            conn_id,
            conn_type=fields.conn_type,
            host=fields.host,
            port=fields.port,
            login=fields.login,
            password=fields.password,
            schema=fields.schema,
            extra=fields.extra_dejson,
        )
        topology = RabbitMQDelayHook(conn_id).topology
        found[conn_id] = ([(host.host, host.port, host.virtual_host) for host in hosts], hosts[0].heartbeat, topology)
    assert [(hosts, heartbeat, topology.name, topology.routing) for hosts, heartbeat, topology in found.values()] == [
        ([("rabbit1", 5672, "/")], 30, "delayed", "direct"),
        ([("rabbit1", 5672, "shop"), ("rabbit2", 5673, "shop")], None, "delayed", "direct"),
        ([("rabbit1", 5672, "shop")], None, "nservicebus", "direct"),
    ]


@pytest.fixture
def users(here: Path, vhost: VirtualHost, connect: Connect) -> Iterator[dict[str, str]]:
    """The users whose rights the page on installing lists: what they are for, and their connection."""
    text = (here / "docs" / "rabbitmq" / "install.md").read_text()
    line = r"^rabbitmqctl set_permissions -p / (\w+) '(.*?)' '(.*?)' '(.*?)'$"
    made, found = [], {}
    try:
        for what, configure, write, read in re.findall(line, text, re.MULTILINE):
            name = f"{what}-{uuid4().hex[:8]}"
            made.append(name)
            vhost.manage("PUT", f"users/{name}", {"password": "p", "tags": "management"})
            rights = {"configure": configure, "write": write, "read": read}
            vhost.manage("PUT", f"permissions/{{vhost}}/{name}", rights)
            found[what] = connect(what, **{**vhost.connection, "login": name, "password": "p"})
        yield found
    finally:
        for name in made:
            vhost.manage("DELETE", f"users/{name}")


def test_the_rights_that_are_listed_suffice(users: dict[str, str], vhost: VirtualHost) -> None:
    hooks = {what: RabbitMQDelayHook(conn_id) for what, conn_id in users.items()}
    assert hooks["installer"].install(["orders"], create_destinations=True).ok
    due = utcnow() + timedelta(seconds=1000)
    report = hooks["sender"].send(
        DelayedMessage(destination="orders", body=b"", due_at=due - late, message_id=f"m{late.seconds}")
        for late in (timedelta(0), timedelta(seconds=1000))
    )
    assert report.sent == 2
    # by the direct entry, or it would have needed more than a key
    with vhost.channel() as channel:
        method, _, _ = channel.basic_get("delayed.hex.0000300")
        assert method is not None
        assert method.exchange == ""
    assert hooks["watcher"].verify(["orders"]).ok
    assert hooks["watcher"].waiting().messages == 1
    with vhost.channel() as channel:
        channel.confirm_delivery()
        for name in ("orders", "gone"):
            key = DELAYED.digits.routing_key(0, name)
            channel.basic_publish("delayed.hex.unroutable", key, b"", BasicProperties(message_id=name))
    again = hooks["redriver"].redrive()
    assert (again.by_destination, again.remaining) == ({"orders": 1}, {"destination 'gone': missing": 1})
    with pytest.raises(TransportUnavailable, match="connection 'watcher': the broker refused: ACCESS_REFUSED"):
        hooks["watcher"].redrive()
