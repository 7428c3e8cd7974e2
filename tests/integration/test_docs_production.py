"""docs/operations/production.md and docs/upgrading.md: a restored store, the commands, the defaults."""

from __future__ import annotations

import io
import os
import re
import shlex
import sqlite3
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import Connection
from support.stores import Store, Transport, message

from airflow_delayed.store.dispatch.dispatcher import database_time
from airflow_delayed.store.policy import DispatchPolicy

pytestmark = pytest.mark.long

LATER = timedelta(minutes=2)


def later(connection: Connection) -> datetime:
    return database_time(connection) + LATER


def copy(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as one, closing(sqlite3.connect(target)) as other:
        one.backup(other)


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_a_restored_store_does_not_know_what_happened_since(store: Store, tmp_path: Path) -> None:
    hook = store.installed()
    now = hook.now()
    soon = now + LATER / 2
    hook.send([message("dispatched", now), *(message(name, soon) for name in ("cancelled", "erased", "rescheduled"))])
    hook.send([message("expired", soon, expires_at=soon + LATER / 4)])
    database, backup = tmp_path / "store.db", tmp_path / "backup.db"
    copy(database, backup)

    before = Transport()
    assert store.dispatcher(hook, before).run().dispatched == 1
    hook.cancel(["cancelled"])
    hook.erase(["erased"])
    hook.reschedule(["rescheduled"], delay=timedelta(days=1))
    stored = message("stored", soon)
    hook.send([stored])
    copy(backup, database)

    after = Transport()
    report = store.dispatcher(hook, after, database_time=later).run()
    assert (before.ids, sorted(after.ids)) == (["dispatched"], ["cancelled", "dispatched", "erased", "rescheduled"])
    assert report.expired == 1
    assert hook.get("stored") is None
    # its task is cleared
    assert hook.send([stored]).sent == 1


def test_the_defaults_that_the_page_names(here: Path) -> None:
    text = (here / "docs" / "operations" / "production.md").read_text()
    policy = DispatchPolicy()
    assert f"takes ({policy.claim_timeout.seconds} s)" in text
    assert f"{policy.farthest.seconds // 60} minutes fit a DAG" in text
    assert f"for {policy.remember.days} days" in text


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_the_commands_run(store: Store, here: Path, connect, monkeypatch, capsys, tmp_path: Path) -> None:
    from airflow.cli import cli_parser

    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "server")
    hook = store.installed("q", deliver_conn_id=None)
    connect("reminders_db", os.environ[f"AIRFLOW_CONN_{store.conn_id.upper()}"])
    hook.send([message("due-before-the-failure", datetime(2030, 5, 6, 6, 59, tzinfo=timezone.utc))])
    copy(tmp_path / "store.db", tmp_path / "copy.db")
    connect("copy_db", os.environ[f"AIRFLOW_CONN_{store.conn_id.upper()}"].replace("store.db", "copy.db"))
    # who runs them answers what is asked
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    parser, done = cli_parser.get_parser(), []
    for page in ("operations/production.md", "upgrading.md"):
        blocks = re.findall(r"^ *```sh\n(.*?)^ *```$", (here / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
        for line in "".join(blocks).splitlines():
            args = parser.parse_args(shlex.split(line)[1:])
            args.func(args)
            done.append(args.subcommand)
    assert done == ["doctor", "counts", "cancel", "cancel"]
    out = capsys.readouterr().out
    # no dispatcher has been at work yet
    assert "Errors: 0, other findings: 1" in out
    assert re.search(r"cancelled +\| 1 ", out)
    assert [each.message_id for each in hook.list()] == ["due-before-the-failure"]
