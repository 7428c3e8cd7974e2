"""``airflow delayed ...``, by the real program."""

from __future__ import annotations

import getpass
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.standing import give_up, mark_dispatched
from support.stores import Store, message

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import Origin, key_id

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)

pytestmark = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


@pytest.fixture
def hook(store: Store) -> DelayedStoreHook:
    made = store.installed()
    made.send(message(f"m{n}", LATER + n * timedelta(hours=1), tag="t" if n < 3 else "u") for n in range(6))
    mark_dispatched(made, "m4")
    give_up(made, "m5")
    return made


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict]:
        assert self.code == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def program(store: Store, here: Path) -> Callable[..., Done]:
    """The real program, which takes seconds to start."""

    def run(command: str, *arguments: str) -> Done:
        words = [sys.executable, "-m", "airflow", "delayed", command, "--store-conn-id", store.conn_id, *arguments]
        found = {**os.environ, "PYTHONPATH": str(here)}
        done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=found)
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def delayed(store: Store, monkeypatch, capsys) -> Callable[..., Done]:
    """The same in this process, from the parser on."""
    from airflow.cli import cli_parser

    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "server")
    parser = cli_parser.get_parser()

    def run(command: str, *arguments: str, answer: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        args = parser.parse_args(["delayed", command, "--store-conn-id", store.conn_id, *arguments])
        code = 0
        capsys.readouterr()
        try:
            args.func(args)
        except SystemExit as end:
            print(end, file=sys.stderr)
            code = 1
        done = capsys.readouterr()
        return Done(code, done.out, done.err)

    return run


def test_a_store_is_seen(hook: DelayedStoreHook, program, delayed):
    first = program("list", "--limit", "2", "-o", "json")
    assert [one["message_id"] for one in first.rows] == ["m0", "m1"]
    assert first.rows[0]["due_at"] == LATER.isoformat()
    assert (first.rows[0]["retry_count"], first.rows[0]["tag"]) == (0, "t")
    token = first.err.rpartition("--after ")[2].strip()
    rest = delayed("list", "--after", token, "--state", "waiting", "--state", "failed", "-o", "json").rows
    assert [(one["message_id"], one["state"]) for one in rest] == [
        ("m2", "waiting"),
        ("m3", "waiting"),
        ("m5", "failed"),
    ]
    assert [one["message_id"] for one in delayed("list", "m3", "m4", "m0", "-o", "json").rows] == ["m0", "m3"]
    (counts,) = delayed("counts", "-o", "json").rows
    assert (counts["waiting"], counts["failed"], counts["remembered"]) == (4, 1, 1)
    table = delayed("counts", "--tag", "t", "--by-destination")
    assert ["waiting" in table.out, "to q" in table.out, "remembered" in table.out] == [True, True, False]
    (known,) = delayed("get", "m4", "-o", "json").rows
    assert (known["state"], known["destination"]) == ("dispatched", "q")
    left = delayed("list", "--state", "dispatched", "--state", "cancelled", "-o", "json").rows
    assert [(one["message_id"], one["state"]) for one in left] == [("m4", "dispatched")]
    table = delayed("list", "--due-from", (LATER + timedelta(hours=3)).isoformat())
    assert ["m3" in table.out, "m5" in table.out, "m2" in table.out] == [True, True, False]
    assert "queue 'q' is not there" in table.out
    # the connection that delivers, as --deliver-conn-id names it
    columns = delayed("list", "m3", "-o", "plain").out.split()
    assert ["deliver_conn_id" in columns, "broker" in columns] == [True, True]


def test_a_message_is_found_by_the_columns_of_its_id(hook: DelayedStoreHook, delayed):
    ids = [key_id(["order_id"], [value]) for value in (1001, 1002)]
    hook.send(message(name, LATER) for name in ids)
    (known,) = delayed("get", "order_id=1001", "-o", "json").rows
    assert known["message_id"] == ids[0]
    rows = delayed("list", "order_id=1001", "order_id=1002", "m0", "-o", "json").rows
    assert {one["message_id"] for one in rows} == {*ids, "m0"}
    # never all of them
    assert delayed("list", "order_id=1003", "-o", "json").rows == []
    assert "has no message order_id=1003" in delayed("get", "order_id=1003").err


@pytest.mark.parametrize("output", ["table", "plain"])
@pytest.mark.parametrize(
    "text, shown",
    [
        ("[/x]", "[/x]"),
        ("[link=x]y[/link]", "[link=x]y[/link]"),
        ("\x1b[1mbold\x07", "\\x1b[1mbold\\x07"),
        ("a\nm9", "a\\nm9"),
    ],
)
def test_a_text_of_others_is_only_a_text(hook: DelayedStoreHook, delayed, monkeypatch, output, text, shown):
    monkeypatch.setenv("COLUMNS", "300")
    hook.send([message("new", LATER, tag=text, destination=text)])
    for words in (("list", "new"), ("get", "new"), ("counts", "--by-destination")):
        done = delayed(*words, "-o", output)
        assert done.code == 0
        # a table of many columns breaks what is long
        assert shown in done.out or words[0] == "get"
        assert "\x1b" not in done.out
    # in JSON it is what it was
    assert delayed("get", "new", "-o", "json").rows[0]["tag"] == text


def test_a_change_by_filter_asks(hook: DelayedStoreHook, delayed):
    no = delayed("cancel", "--tag", "t", answer="n\n")
    assert no.code == 1
    assert "This would be: 3 cancelled. Go on? (y/N)" in no.err
    assert "Nothing was changed." in no.err
    # nobody is there to answer
    assert delayed("cancel", "--tag", "t").code == 1
    assert hook.get("m0").state == "waiting"
    yes = delayed("cancel", "--tag", "t", "-o", "json", answer="y\n")
    assert yes.rows == [{"outcome": "cancelled", "messages": 3, "examples": ["m0", "m1", "m2"]}]
    assert hook.get("m0").state == "cancelled"
    none = delayed("cancel", "--tag", "t", "-o", "json")
    assert (none.rows, "No message would be changed." in none.err) == ([], True)
    (record,) = hook.audit()
    assert (record.who, record.action, record.selection, record.counts) == (
        getpass.getuser(),
        "cancel",
        {"tag": "t"},
        {"cancelled": 3},
    )


@pytest.mark.parametrize(
    "command, done",
    [(["cancel"], "cancelled"), (["reschedule", "--due-at", LATER.isoformat()], "rescheduled"), (["erase"], "erased")],
)
def test_a_change_names_what_a_broker_has_already(hook: DelayedStoreHook, delayed, command: list[str], done: str):
    due_at = LATER.replace(microsecond=0)
    hook.note_sent([message("direct", due_at, tag="u")])
    says = f"1 was dispatched to broker, is due at {due_at.isoformat()} and cannot be taken back"
    chosen = ["--tag", "u", "--destination", "q"]
    asked = delayed(*command, *chosen, answer="n\n")
    assert f"{done}; {says}" in asked.err
    assert ". Go on? (y/N)" in asked.err
    answer = delayed(*command, *chosen, "--yes", "-o", "json")
    assert says in answer.err
    row = {"deliver_conn_id": "broker", "messages": 1, "until": due_at.isoformat(), "examples": []}
    assert {"outcome": "dispatched, not due yet", **row} in answer.rows
    # where only standard output is looked at
    hook.note_sent([message("other", due_at, tag="v")])
    table = delayed(*command, "--tag", "v", "--destination", "q", "--yes")
    assert says in table.err
    assert "dispatched, not due yet" in table.out
    by_id = delayed(*command, "other", "-o", "json")
    assert (by_id.rows, says in by_id.err) == ([{"message_id": "other", "outcome": "dispatched"}], True)


def test_a_cancel_is_taken_back(hook: DelayedStoreHook, delayed):
    delayed("cancel", "--tag", "t", "--yes")
    back = delayed("restore", "--tag", "t", "--actor", "ann", "--because", "by mistake", "-o", "json", answer="y\n")
    assert "This would be: 3 restored. Go on? (y/N)" in back.err
    assert back.rows == [{"outcome": "restored", "messages": 3, "examples": ["m0", "m1", "m2"]}]
    assert next(hook.audit()).because == "by mistake"
    delayed("reschedule", "m1", "--due-at", "2020-01-01T00:00:00+00:00")
    delayed("cancel", "--tag", "t", "--yes")
    would = delayed("restore", "--state", "cancelled", "--dry-run", "-o", "json").rows
    assert {one["outcome"]: one["messages"] for one in would} == {"restored": 2, "overdue": 1}
    both = delayed("restore", "m0", "m1", "--overdue-ok", "-o", "json").rows
    assert [one["outcome"] for one in both] == ["restored", "restored"]
    assert hook.cancel(["m0", "m1"]).changed == 2


def test_each_change(hook: DelayedStoreHook, delayed):
    later = (LATER + timedelta(days=1)).isoformat()
    moved = delayed("reschedule", "m0", "m4", "--due-at", later, "-o", "json")
    assert moved.rows == [
        {"message_id": "m0", "outcome": "rescheduled"},
        {"message_id": "m4", "outcome": "dispatched"},
    ]
    assert hook.get("m0").due_at == LATER + timedelta(days=1)
    assert delayed("reschedule", "m0", "--delay", "60").code == 0
    in_a_minute = hook.get("m0").due_at
    assert in_a_minute < LATER
    assert delayed("reschedule", "m0", "--delay", "PT1H").code == 0
    assert timedelta(minutes=59) <= hook.get("m0").due_at - in_a_minute < timedelta(hours=1, minutes=5)
    assert delayed("retry", "m5", "-o", "json").rows == [{"message_id": "m5", "outcome": "retried"}]
    assert hook.get("m5").last_error is None
    planned = delayed("erase", "--tag", "t", "--dry-run", "-o", "json")
    assert planned.rows[0] == {"outcome": "erased", "messages": 3, "examples": ["m0", "m1", "m2"]}
    assert "not reached: rejects files, queue tables, brokers, spools of up to seven days, backups" in planned.err
    assert hook.get("m1").state == "waiting"
    erased = delayed("erase", "--tag", "t", "--yes", "-o", "yaml", "--actor", "ann", "--because", "she asked")
    assert (erased.code, "messages: 3" in erased.out) == (0, True)
    [recorded] = hook.audit(limit=1)
    assert (recorded.who, recorded.because) == (f"{getpass.getuser()}, for ann", "she asked")
    assert (hook.get("m0").state, hook.get("m4").state) == ("erased", "dispatched")


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["cancel"], "cancel: give ids, tag= or another filter"),
        (["cancel", "m0", "--tag", "t"], "cancel: give ids or a filter, and not both"),
        (["get", "m9"], "has no message m9"),
        (["reschedule", "m0", "--due-at", "2030-01-01T00:00:00"], "--due-at: 2030-01-01 00:00:00 has no time zone"),
        (["reschedule", "m0", "--delay", "P1M"], "'P1M' has months or years"),
        (["list", "--table", "other"], "table other: missing"),
        (["counts", "--store-conn-id", "gone"], "The conn_id `gone` isn't defined"),
    ],
    ids=str,
)
def test_what_cannot_be_is_told_in_a_line(hook: DelayedStoreHook, delayed, arguments, text):
    done = delayed(*arguments)
    assert done.code == 1
    assert text in done.err
    assert done.out == ""


TEXTS = ["--tag", "--destination", "--deliver-conn-id"]


@pytest.mark.parametrize(
    "command, option",
    [
        *product(
            ["cancel", "restore", "reschedule", "retry", "erase", "list"], [*TEXTS, "--due-from", "--due-until", "id"]
        ),
        *product(["counts"], TEXTS),
    ],
)
def test_a_variable_of_the_shell_that_is_not_set_changes_nothing(
    hook: DelayedStoreHook, delayed, command: str, option: str
):
    before = {one.message_id: one.due_at for one in hook.list()}
    more = {"reschedule": ["--delay", "5"], "list": [], "counts": []}.get(command, [])
    more += ["--yes"] if command not in ("list", "counts") else []
    other = ["--destination", "q"] if option != "--destination" else ["--tag", "t"]
    done = delayed(command, *([""] if option == "id" else [option, "", *other]), *more)
    assert (done.code, done.out) == (1, "")
    text = f"{option}: '' is not a time" if "due" in option else f"{option} is empty, so nothing is changed"
    assert (text if option != "id" else "an id of a message is empty, so nothing is changed") in done.err
    assert {one.message_id: one.due_at for one in hook.list()} == before


def test_messages_are_paused_and_resumed(hook: DelayedStoreHook, delayed):
    (would,) = delayed("pause", "--destination", "q", "--dry-run", "-o", "json").rows
    assert (would["waiting"], would["with_broker"], hook.pauses()) == (4, 1, [])
    refused = delayed("pause", "--destination", "q", answer="n")
    assert (refused.code, hook.pauses()) == (1, [])
    assert "This would be: pause destination 'q': 4 messages wait in the store; 1 are already with" in refused.err
    assert delayed("pause", "--destination", "q", answer="y").code == 0
    broker = ("--deliver-conn-id", "broker")
    assert delayed("pause", *broker, "--because", "upgrade", "--actor", "ann", "--yes").code == 0
    first, second = delayed("pause", "-o", "json").rows
    assert (first["selection"], second["selection"]) == ({"destination": "q"}, {"deliver_conn_id": "broker"})
    assert (second["because"], second["who"].endswith("for ann")) == ("upgrade", True)
    assert "broker" in delayed("pause").out
    (ended,) = delayed("pause", "--end", *broker, "--yes", "-o", "json").rows
    assert (ended["ended"], ended["selection"]) == (True, {"deliver_conn_id": "broker"})
    again = delayed("pause", "--end", *broker, "--yes")
    assert (again.code, again.err.strip()) == (1, "Nothing was changed: that is not paused.")
    for wrong, text in (
        (("--end",), "give what to pause: a destination= or a deliver_conn_id="),
        (("--destination", "q", *broker), "give what to pause: a destination= or a deliver_conn_id="),
        (("--destination", " "), "--destination is empty"),
    ):
        done = delayed("pause", *wrong, "--yes")
        assert (done.code, text in done.err) == (1, True), done.err


def test_what_a_dag_or_a_run_stored_is_listed_cancelled_and_restored(hook: DelayedStoreHook, delayed):
    for number in (1, 2):
        hook.origin = Origin(dag_id="nightly", run_id=f"r{number}", task_id="send")
        hook.send([message(f"of-r{number}", hook.now() + timedelta(hours=1))])
    run, dag = ("--dag-id", "nightly", "--run-id", "r1"), ("--dag-id", "nightly")
    assert [one["message_id"] for one in delayed("list", *run, "-o", "json").rows] == ["of-r1"]
    assert delayed("cancel", *run, "--yes", "-o", "json").rows[0]["messages"] == 1
    assert delayed("restore", *run, "--yes", "-o", "json").rows[0]["messages"] == 1
    assert delayed("cancel", *dag, "--yes", "-o", "json").rows[0]["messages"] == 2
    assert delayed("list", *dag, "-o", "json").rows == []
    refused = delayed("cancel", "--run-id", "r1", "--yes")
    assert (refused.code, "--run-id needs --dag-id" in refused.err) == (1, True)


def test_the_commands_are_these(delayed):
    from airflow_delayed.cli.definition import get_delayed_commands

    (group,) = get_delayed_commands()
    assert " ".join(sorted(command.name for command in group.subcommands)) == (
        "cancel counts dispatcher doctor erase get install list pause redrive reschedule restore retry uninstall"
    )


def test_airflow_starts_no_slower(store: Store, fresh: dict[str, Any]):
    """The commands are there, and nothing that does their work is imported yet."""
    assert fresh["the commands"] == {
        "there": True,
        "imported": [
            "airflow_delayed",
            "airflow_delayed.cli",
            "airflow_delayed.cli.definition",
            "airflow_delayed.provider_info",
        ],
    }
