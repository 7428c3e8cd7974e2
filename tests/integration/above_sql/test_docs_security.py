"""docs/security.md: after the steps by which it erases a person's data no table has the person's text."""

from __future__ import annotations

import json
import os
import re
import shlex
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import inspect
from support.standing import give_up
from support.stores import Store, message, on_postgres_too

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.store.schema import store_tables

PERSON = "Ada Lovelace"
TAG = "customer-4711"
IDS = "flight-17-"
#: Texts of the person alone: another customer has the tag customer-47110 and the ids from flight-17-10 on.
OF_PERSON = (PERSON, rf"{TAG}(?!\d)", rf"{IDS}[1-4](?!\d)")


@pytest.fixture
def steps(here: Path) -> list[tuple[str, str]]:
    """Each command and statement of the page's steps, with its language."""
    section = (here / "docs" / "security.md").read_text().partition("\n## Erase a person's data\n")[2]
    blocks = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", section.partition("\n## ")[0], re.DOTALL | re.MULTILINE)
    return [(language, line.strip()) for language, block in blocks for line in block.splitlines()]


def places(store: Store, hook: DelayedStoreHook, wanted: str) -> set[str]:
    """The tables of the database in which a pattern is, in any column."""
    names = inspect(hook.engine).get_table_names(schema=store.schema)
    assert {"delayed_messages", "reminders"} <= {*names}
    return {
        name
        for name in names
        if any(
            re.search(wanted, cell)
            for row in store.sql(hook, f'SELECT * FROM {{s}}"{name}"')
            for cell in map(readable, row)
        )
    }


def readable(cell: object) -> str:
    return bytes(cell).decode("latin-1") if isinstance(cell, bytes | memoryview) else str(cell)


def fill(store: Store, hook: DelayedStoreHook) -> None:
    """Store the person's messages, and bring them into every place."""
    due = hook.now()

    def of_person(number: int, hours: int = 1, **fields: object):
        body, headers = f"Dear {PERSON}".encode(), {"Name": PERSON}
        at = due + timedelta(hours=hours)
        return message(
            f"{IDS}{number}", at, body=body, headers=headers, tag=TAG, **{"destination": "reminders", **fields}
        )

    hook.send([of_person(1, -1), message(f"{IDS}10", due, destination="reminders", tag="customer-47110")])
    assert store.dispatcher(hook).run().dispatched == 2
    hook.send([of_person(2)])
    hook.cancel(tag=TAG)
    hook.send([of_person(3), of_person(4), message(f"{IDS}11", due + timedelta(hours=1), tag="customer-47110")])
    hook.reschedule([f"{IDS}3"], delay=timedelta(hours=2))
    give_up(hook, f"{IDS}4", error="queue reminders is gone")


@on_postgres_too
def test_nothing_of_the_person_is_in_any_table(
    store: Store,
    steps: list[tuple[str, str]],
    here: Path,
    connect: Callable[..., str],
    monkeypatch,
    capsys,
    tmp_path: Path,
) -> None:
    from airflow.cli import cli_parser

    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "server")
    hook = store.installed("reminders", deliver_conn_id=None)
    connect("reminders_db", os.environ[f"AIRFLOW_CONN_{store.conn_id.upper()}"])
    fill(store, hook)
    # a cancel keeps the content for a while
    content = {"delayed_messages", "delayed_messages_failed", "delayed_messages_cancelled", "reminders"}
    person, tag, ids = OF_PERSON
    assert places(store, hook, person) == content
    stored = {*content, "delayed_messages_past"} - {"reminders"}
    assert places(store, hook, tag) == {*stored, "delayed_messages_audit"}
    assert places(store, hook, ids) == {*content, "delayed_messages_past", "delayed_messages_audit"}

    parser, schema = cli_parser.get_parser(), [] if store.schema is None else ["--schema", store.schema]
    shown = []
    for language, line in steps:
        if language == "sql":
            store.sql(hook, re.sub(r"FROM (\w+)", r"FROM {s}\1", line.rstrip(";")))
        elif line.startswith("airflow delayed "):
            args = parser.parse_args([*shlex.split(line)[1:], *schema])
            capsys.readouterr()
            args.func(args)
            shown.append((args.subcommand, capsys.readouterr().out))
        else:
            parser.parse_args(shlex.split(line)[1:])
        if shown[0][0] == "erase" and len(shown) == 1 and language != "sql":
            assert places(store, hook, person) == content, "a dry run changes nothing"
        if shown[-1][0] == "get" and language != "sql":
            # the queue table is not reached
            assert [places(store, hook, each) for each in (person, tag)] == [{"reminders"}, set()]
            # a late retry stores none of them again
            late = [message(f"{IDS}{number}", hook.now(), destination="reminders") for number in (1, 2, 3, 4)]
            report = hook.send(late)
            assert (report.sent, report.duplicates) == (0, 4)
            (recorded,) = hook.audit(message_id=f"{IDS}1", limit=1)
            assert (recorded.action, recorded.selection["first"][0]) == ("erase", f"{IDS}1")
    assert [name for name, _ in shown] == ["erase", "erase", "list", "get"]
    assert {row["outcome"]: row["messages"] for row in json.loads(shown[1][1])} == {"erased": 3, "dispatched": 1}
    listed, found = (text for _, text in shown[-2:])
    assert "No data found" in listed
    assert re.search(rf"{IDS}1 +\| erased +\|", found)
    assert [places(store, hook, wanted) for wanted in OF_PERSON] == [{"reminders"}, set(), {"reminders"}]
    # nothing of another customer, whose ids and tag begin in the same way
    assert [each.message_id for each in hook.list()] == [f"{IDS}11"]
    assert places(store, hook, f"{IDS}10") == {"reminders", "delayed_messages_past"}

    if hook.engine.dialect.name == "sqlite":
        # as a consumer takes them
        store.sql(hook, "DELETE FROM {s}reminders")
        store.close()
        with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as connection:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        written = b"".join(file.read_bytes() for file in tmp_path.glob("store.db*"))
        assert b"flight-17-11" in written
        assert [each for each in OF_PERSON if re.search(each.encode(), written)] == []


def test_the_table_of_places_has_each_table_and_the_arguments_that_airflow_shows(here: Path) -> None:
    table = (
        (here / "docs" / "security.md").read_text().partition("\n## What is stored where\n")[2].partition("\n## ")[0]
    )
    named = set(re.findall(r"`(?:delayed_messages)?(_?\w*)`", table))
    names = {each.name.removeprefix("delayed_messages") for each in store_tables()}
    # which release made the tables is nobody's data
    assert names - {"_version"} <= named
    (fields,) = re.findall(r"rendered fields \| (.*?) \|", table)
    shown, never = (set(re.findall(r"`(\w+)=`", part)) for part in fields.split("never"))
    assert shown <= {*DelayedSendOperator.template_fields}
    assert never == {"messages", "value"}
    assert not never & {*DelayedSendOperator.template_fields}
