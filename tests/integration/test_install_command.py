"""``airflow delayed install``: what it makes, and the SQL that it prints for a database administrator."""

from __future__ import annotations

import re
import shlex
import sqlite3
import subprocess
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.commands import Command
from support.rabbitmq import virtual_host
from support.stores import message

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.sqs import SqsDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.schema import VERSION
from services import packages, sqs

PAST = datetime(2020, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def file(tmp_path: Path, connect) -> Path:
    """An empty SQLite database, the connection ``reminders_db``."""
    path = tmp_path / "store.db"
    connect("reminders_db", conn_type="sqlite", host=str(path))
    return path


def run_script(file: Path, script: str) -> None:
    packages.require("sqlite3", "sqlite3")
    subprocess.run(["sqlite3", "-bail", file], input=script, text=True, check=True, capture_output=True)


def test_a_stores_tables_are_made(file: Path, airflow_command: Command):
    plan = airflow_command("install", "--conn-id", "reminders_db", "--queue", "alarms", "--dry-run", "-o", "json")
    assert (plan.code, plan.out.count('"would create"')) == (0, 10)
    with closing(DelayedStoreHook("reminders_db")) as hook:
        assert not hook.verify(["alarms"]).ok
        done = airflow_command("install", "--conn-id", "reminders_db", "--queue", "alarms", "-o", "json")
        assert done.code == 0, done.err
        assert hook.verify(["alarms"]).ok


def test_sqlites_own_client_runs_the_script(file: Path, airflow_command: Command):
    done = airflow_command("install", "--sql", "--conn-id", "reminders_db", "--queue", "alarms")
    assert done.code == 0, done.err
    # it may be run again
    for _ in range(2):
        run_script(file, done.out)
    with closing(DelayedStoreHook("reminders_db")) as hook:
        assert hook.verify(["alarms"]).ok
        assert hook.install(["alarms"]).counts() == {"ok": 10}
        assert hook.send([message("m", PAST, destination="alarms")]).sent == 1


def test_the_script_leaves_tables_of_another_release_at_their_version(file: Path, airflow_command: Command):
    script = airflow_command("install", "--sql", "--dialect", "sqlite").out
    run_script(file, script)
    with closing(sqlite3.connect(file)) as database:
        database.execute('UPDATE delayed_messages_version SET "Version" = 0')
        database.commit()
        run_script(file, script)
        assert database.execute('SELECT "Version" FROM delayed_messages_version').fetchall() == [(0,)]


def test_the_script_needs_no_database(airflow_command: Command, connect):
    # nothing listens there
    connect("postgres_store", "postgresql://user@127.0.0.1:1/db")
    names = ("--table", 'a "strange" % name', "--schema", "delayed")
    done = airflow_command("install", "--sql", "--conn-id", "postgres_store", *names)
    assert done.code == 0, done.err
    assert done.out == airflow_command("install", "--sql", "--dialect", "postgresql", *names).out
    assert 'CREATE TABLE IF NOT EXISTS "delayed"."a ""strange"" % name_past"' in done.out
    for dialect, text in {
        "mysql": "COLLATE utf8mb4_0900_bin",
        "mariadb": "COLLATE utf8mb4_nopad_bin",
    }.items():
        script = airflow_command("install", "--sql", "--dialect", dialect).out
        assert (text in script, f"SELECT {VERSION} " in script) == (True, True)


@pytest.mark.parametrize(
    "words, text",
    [
        (["--sql", "--conn-id", "mysql_store"], "add --dialect mysql or --dialect mariadb"),
        (["--sql", "--conn-id", "broker"], "airflow delayed install --conn-id broker --queue ... --dry-run"),
        (["--sql", "--conn-id", "queues"], "has no SQL"),
        (["--sql"], "--sql needs the connection of the store, or --dialect"),
        (["--dialect", "mysql"], "--dialect is for --sql alone"),
        (["--queue", "q"], "--conn-id is missing"),
        (["--conn-id", "broker", "--table", "t"], "has no table"),
        (["--sql", "--dialect", "sqlite", "--queue", "q" * 64], "the name of a table has up to 63"),
    ],
)
def test_what_cannot_be_done_is_an_error_that_names_the_remedy(
    airflow_command: Command, connect, words: list[str], text: str
):
    connect("mysql_store", "mysql://user@127.0.0.1:1/db")
    connect("broker", "amqp://user@127.0.0.1:1/")
    connect("queues", conn_type="aws")
    done = airflow_command("install", *words)
    assert (done.code, done.out) == (1, "")
    assert text in done.err


def test_rabbitmqs_topology_is_made(rabbitmq_url: str, airflow_command: Command, connect):
    with virtual_host(rabbitmq_url) as broker:
        connect("broker", **broker.connection)
        words = ("install", "--conn-id", "broker", "--queue", "orders", "-o", "json")
        hook = RabbitMQDelayHook("broker")
        plan = airflow_command(*words, "--dry-run")
        assert (plan.code, "queue orders" in plan.out) == (0, True)
        assert not hook.verify(["orders"]).ok
        assert airflow_command(*words).code == 0
        assert hook.verify(["orders"]).ok
        hook.close()


def test_sqs_queues_are_made(sqs_endpoint: str, airflow_command: Command, connect, tmp_path: Path):
    prefix = f"{urlsplit(tmp_path.as_uri()).path.replace('/', '')[-12:].strip('-')}-"
    connect("queues", **sqs.connection(sqs_endpoint, queue_name_prefix=prefix))
    hook = SqsDelayHook("queues")
    assert not hook.verify(["orders"]).ok
    done = airflow_command("install", "--conn-id", "queues", "--queue", "orders", "-o", "json")
    assert done.code == 0, done.err
    assert hook.verify(["orders"]).ok
    hook.close()


def test_the_commands_of_the_page(file: Path, airflow_command: Command, here: Path):
    page = (here / "docs/store/install.md").read_text()
    commands = re.findall(r"^airflow delayed (install .*?)(?: > install.sql)?$", page, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        done = airflow_command(*shlex.split(command))
        assert done.code == 0, done.err
