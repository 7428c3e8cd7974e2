"""The GRANT lists of docs/store/rights.md: each user does its work with them, and has nothing more."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import pytest
from support.commands import Command
from support.stores import Store, Transport, message, run_sql

from airflow_delayed.errors import DelayedError
from airflow_delayed.identity import Origin

pytestmark = pytest.mark.mariadb

LATER = datetime(2030, 5, 6, 7, 8, 9, tzinfo=timezone.utc)
PAST = datetime(2020, 1, 1, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)
USERS = ("installer", "sender", "dispatcher", "editor", "viewer")


def statements(page: str, heading: str) -> list[list[str]]:
    """The SQL of a chapter: before the install, and after it."""
    chapter = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [
        [one for one in block.split(";\n") if one.strip()] for block in re.findall(r"```sql\n(.*?)```", chapter, re.S)
    ]


@pytest.fixture(params=["postgres", "mariadb"])
def world(request: pytest.FixtureRequest, connect: Callable[..., str], here: Path) -> Iterator[SimpleNamespace]:
    """Users without rights, a schema of theirs, and the lists for them."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    postgres, name = request.param == "postgres", f"delayed_{uuid4().hex[:8]}"

    def named(statement: str) -> str:
        own = re.sub(r"\bdelayed\.(?=[d\"*])", f"{name}.", statement).replace("SCHEMA delayed ", f"SCHEMA {name} ")
        return re.sub(r"\bdelayed_(installer|sender|dispatcher|editor|viewer)\b", rf"{name}_\1", own).replace("%", "%%")

    host = "" if postgres else "@'%'"
    before, after = statements((here / "docs/store/rights.md").read_text(), "PostgreSQL" if postgres else "MariaDB")
    make = "CREATE USER {} PASSWORD 'x'" if postgres else "CREATE USER {}@'%' IDENTIFIED BY 'x'"
    run_sql(url, f"CREATE SCHEMA {name}", *(make.format(f"{name}_{user}") for user in USERS))
    stores = []

    def store(user: str) -> Store:
        parts = urlsplit(url)
        place = f"{name}_{user}:x@{parts.hostname}:{parts.port}"
        path = parts.path if postgres else f"/{name}"
        made = Store(connect(f"{name}_{user}", urlunsplit(parts._replace(netloc=place, path=path))), name)
        stores.append(made)
        return made

    def grant(which: list[str]) -> None:
        run_sql(url, *(named(one) for one in which))

    client = ["psql", "-v", "ON_ERROR_STOP=1", "-q", "-d", url] if postgres else mariadb_client(url)
    yield SimpleNamespace(
        store=store,
        before=lambda: grant(before),
        after=lambda: grant(after),
        schema=name,
        client=client,
        dialect="postgresql" if postgres else "mariadb",
        grant=lambda which, who: [who.sql(who.hook(), named(one).replace(";", "")) for one in which],
        grant_queue=lambda: grant([f"GRANT SELECT, INSERT ON {name}.alarms TO {name}_dispatcher"]),
    )
    for made in stores:
        made.close()
    run_sql(url, f"DROP SCHEMA {name}" + (" CASCADE" if postgres else ""))
    for user in USERS:
        run_sql(url, *([f"DROP OWNED BY {name}_{user}"] if postgres else []), f"DROP USER {name}_{user}{host}")


def mariadb_client(url: str) -> list[str]:
    """The command of MariaDB's own client for a server."""
    parts = urlsplit(url)
    login = [f"--user={parts.username}", f"--password={parts.password}", "--protocol=tcp", f"--host={parts.hostname}"]
    return ["mariadb", "--no-defaults", *login, f"--port={parts.port}", parts.path.lstrip("/")]


def test_an_administrator_runs_the_script_of_an_install(world: SimpleNamespace, airflow_command: Command):
    script = airflow_command(
        "install", "--sql", "--dialect", world.dialect, "--schema", world.schema, "--queue", "alarms"
    ).out
    # it may be run again
    for _ in range(2):
        subprocess.run(world.client, input=script, text=True, check=True, capture_output=True)
    world.after()
    world.grant_queue()

    viewing = world.store("viewer").hook(deliver_conn_id=None)
    assert viewing.verify(["alarms"]).ok
    sender, dispatching = world.store("sender"), world.store("dispatcher")
    assert sender.hook().send([message("to-broker", PAST)]).sent == 1
    assert sender.hook(deliver_conn_id=None).send([message("to-table", PAST, destination="alarms")]).sent == 1
    transport = Transport()
    dispatching.dispatcher(dispatching.hook(), transport).run()
    dispatching.dispatcher(dispatching.hook()).run()
    assert transport.ids == ["to-broker"]
    assert [viewing.get(name).state for name in ("to-broker", "to-table")] == ["dispatched", "dispatched"]
    # none of them may create a table
    with pytest.raises(DelayedError, match="denied"):
        dispatching.hook(deliver_conn_id=None).install(["more"], create_destinations=True)


def test_a_queue_table_without_rights_holds_up_no_other(world: SimpleNamespace, airflow_command: Command):
    queues = ("--queue", "alarms", "--queue", "closed")
    script = airflow_command("install", "--sql", "--dialect", world.dialect, "--schema", world.schema, *queues).out
    subprocess.run(world.client, input=script, text=True, check=True, capture_output=True)
    world.after()
    world.grant_queue()
    names = ("alarms", "closed")
    world.store("sender").hook(deliver_conn_id=None).send(message(name, PAST, destination=name) for name in names)
    dispatching = world.store("dispatcher")
    hook = dispatching.hook()
    assert dispatching.dispatcher(hook, number_of_retries=0).run().by_connection == {hook.conn_id: 1}
    # it waits for the right, and no retry is counted
    assert dispatching.failures_of(hook) == {"closed": 0}


@pytest.mark.parametrize("world", ["postgres"], indirect=True)
def test_each_user_does_its_work_with_its_list(world: SimpleNamespace):
    world.before()
    installer = world.store("installer").hook()
    installer.install([])
    assert installer.install([]).ok
    world.after()

    sender = world.store("sender")
    origin = Origin(dag_id="d", run_id="r", task_id="t")
    hook = sender.hook(origin=origin)
    hook.keep_anchor(None, LATER)
    assert hook.send([*(message(f"m{n}", LATER) for n in range(3)), message("due", PAST)]).sent == 4
    assert hook.send([message("m0", LATER)]).duplicates == 1
    hook.note_sent([message("at-once", PAST)])
    assert [one.code for one in hook.verify([]).problems] == ["no-dispatcher"]
    assert sender.hook(on_conflict="keep").send([message("m0", PAST)]).sent == 0
    assert sender.hook(on_conflict="replace").send([message("m0", LATER, body=b"other")]).replaced == 1

    dispatching = world.store("dispatcher")
    transport = Transport(refused={"given-up"})
    hook.send([message("given-up", PAST)])
    dispatcher = dispatching.dispatcher(dispatching.hook(), transport, number_of_retries=0)
    with pytest.raises(DelayedError, match="given-up"):
        dispatcher.run()
    assert transport.ids == ["due"]
    # a failed message is replaced too
    assert sender.hook(on_conflict="replace").send([message("given-up", LATER, body=b"other")]).replaced == 1

    viewing = world.store("viewer").hook()
    assert {one.message_id for one in viewing.list()} == {"m0", "m1", "m2", "given-up"}
    assert viewing.counts().waiting == 4
    assert viewing.get("due").state == "dispatched"
    assert len(viewing.dispatchers()) == 1
    assert viewing.verify([]).ok
    assert list(viewing.audit()) == []
    assert viewing.last_dispatched().message_id == "due"

    editing = world.store("editor").hook()
    assert editing.cancel(["m1"]).changed == 1
    assert viewing.get("m1").restorable_until is not None
    assert editing.restore(["m1"]).changed == 1
    assert editing.cancel(["m1"]).changed == 1
    assert editing.reschedule(["m2"], PAST).changed == 1
    assert editing.erase(["m0"]).changed == 1
    # the dispatcher removes what can be taken back no longer
    editor = world.store("editor")
    editor.sql(editing, f"""UPDATE {{s}}"delayed_messages_cancelled" SET "Until" = '{PAST:%Y-%m-%d}'""")
    failing = dispatching.dispatcher(dispatching.hook(), Transport(refused={"m2"}), number_of_retries=0)
    with pytest.raises(DelayedError, match="m2"):
        failing.run()
    assert editor.sql(editing, 'SELECT COUNT(*) FROM {s}"delayed_messages_cancelled"')[0][0] == 0
    assert editing.retry(["m2"]).changed == 1
    assert editing.purge(timedelta(0), reason="remembered").changed > 0
    first = editing.cancel(destination="q", limit=1)
    assert editing.cancel(destination="q", after=first.next, audit_seq=first.audit_seq).audit_seq == first.audit_seq
    assert len(list(viewing.audit())) == 8

    editing.send([message("paused", PAST)])
    editing.pause(destination="q")
    assert len(viewing.pauses()) == 1
    held = Transport()
    dispatching.dispatcher(dispatching.hook(), held).run()
    assert "paused" not in held.ids
    assert editing.unpause(destination="q").pause is not None


def test_a_sender_stores_what_an_editor_cancels_or_remembers(world: SimpleNamespace):
    world.before()
    world.store("installer").hook().install([])
    world.after()
    sending, editing = world.store("sender").hook(), world.store("editor").hook()

    assert sending.send([message("red", LATER)]).sent == 1
    assert editing.cancel_or_remember(["red", "late"], actor="d") == {"red": "cancelled", "late": "absent"}
    assert sending.send([message("late", LATER)]).duplicates == 1


def test_no_user_may_do_the_work_of_another(world: SimpleNamespace):
    world.before()
    world.store("installer").hook().install([])
    world.after()
    with pytest.raises(DelayedError, match="denied"):
        world.store("viewer").hook().send([message("a", LATER)])
    world.store("sender").hook().send([message("a", LATER)])
    with pytest.raises(DelayedError, match="denied"):
        world.store("viewer").hook().cancel(["a"])
    dispatching = world.store("sender")
    with pytest.raises(DelayedError, match="denied"):
        dispatching.dispatcher(dispatching.hook(), Transport()).run()
