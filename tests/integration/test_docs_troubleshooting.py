"""docs/operations/troubleshooting.md: a broken set-up, the page's commands, and output that names the cause."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from support.rabbitmq import VirtualHost, messages
from support.standing import give_up
from support.stores import Store, message

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook

pytestmark = pytest.mark.long

Run = Callable[[str], str]
one_store = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


@pytest.fixture
def page(here: Path) -> Path:
    return here / "docs" / "operations" / "troubleshooting.md"


@pytest.fixture
def run(page: Path, monkeypatch, capsys) -> Run:
    """Run all commands of a symptom, and return their output."""
    from airflow.cli import cli_parser

    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "server")
    monkeypatch.setenv("COLUMNS", "300")
    parser = cli_parser.get_parser()

    def run_commands(title: str) -> str:
        section = page.read_text().partition(f"\n### {title}\n")[2].partition("\n### ")[0]
        commands = [line for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]
        assert commands, title
        capsys.readouterr()
        for command in commands:
            args = parser.parse_args(shlex.split(command)[1:])
            try:
                args.func(args)
            except SystemExit as end:
                if not isinstance(end.code, int):
                    print(end.code)
        return capsys.readouterr().out

    return run_commands


@pytest.fixture
def hook(store: Store, connect) -> DelayedStoreHook:
    """The page's store, whose messages the page's broker delivers."""
    made = store.installed(deliver_conn_id="rabbitmq_default")
    connect("reminders_db", os.environ[f"AIRFLOW_CONN_{store.conn_id.upper()}"])
    return made


@pytest.mark.parametrize("name, count", [("troubleshooting", 20), ("production", 3)])
def test_each_command_is_one(page: Path, name: str, count: int) -> None:
    from airflow.cli import cli_parser

    parser = cli_parser.get_parser()
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```$", (page.parent / f"{name}.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    assert len(lines) >= count
    for line in lines:
        words = shlex.split(line)
        assert words[:2] == ["airflow", "delayed"]
        parser.parse_args(words[1:])


@one_store
def test_old_messages_are_cancelled_or_rescheduled(hook: DelayedStoreHook, run: Run) -> None:
    before = datetime(2026, 1, 30, tzinfo=timezone.utc)
    hook.send([message("old", before), message("new", hook.now() + timedelta(days=9))])
    out = run("Old messages before you dispatch them")
    assert [word in out for word in ("rabbitmq_default", "cancelled", "rescheduled", "new")] == [
        True,
        True,
        True,
        False,
    ]
    assert [each.message_id for each in hook.list()] == ["old", "new"]


@one_store
def test_failed_messages_are_listed_with_the_reason_and_retried(hook: DelayedStoreHook, run: Run) -> None:
    hook.send([message("given-up", hook.now() + timedelta(hours=1), destination="reminders")])
    give_up(hook, "given-up", error="queue reminders is gone")
    assert "were given up and are not tried again" in "".join(str(each) for each in hook.verify([]))
    out = run("Failed grows: DispatchFailed")
    assert "queue reminders is gone" in out
    assert "retried" in out
    assert [each.state for each in hook.list()] == ["waiting"]


def test_unroutable_is_red(vhost: VirtualHost, connect: Callable[..., str], run: Run) -> None:
    vhost.declare("reminders")
    hook = RabbitMQDelayHook(connect("rabbitmq_default", **vhost.connection))
    hook.send(messages("reminders", [3], prefix="lost"))
    with vhost.channel() as channel:
        channel.queue_delete("reminders")
    vhost.until(**{"delayed.hex.unroutable": 1})
    out = run("Unroutable is red")
    assert "warning: connection rabbitmq_default: unroutable" in out
    assert "1 messages whose destination was not there when they were due" in out
    assert "airflow delayed redrive --conn-id rabbitmq_default --dry-run names their destinations" in out
    assert "stays: destination 'reminders': missing" in out
    # the page's remedy has been run
    assert "sent to reminders" in out
    vhost.until(**{"reminders": 1, "delayed.hex.unroutable": 0})
