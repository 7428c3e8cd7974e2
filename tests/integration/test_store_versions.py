"""Tables of another release: those of the one before are used, and upgraded on request; others are left alone."""

from __future__ import annotations

import shlex
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import Column, MetaData, Table, func, insert, inspect, select, update
from support.etl import arm, take_back
from support.lengths import length
from support.stores import Store, Transport, message, store_fixture  # noqa: F401 - a fixture

from airflow_delayed.delivery import State
from airflow_delayed.errors import DelayedError, TopologyError
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.store.records import to_row
from airflow_delayed.store.schema import VERSION

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
PAST = datetime(2020, 1, 1, tzinfo=timezone.utc)
ROWS = length("messages sent and dispatched during an upgrade", 20_000, 1_000_000)
#: Breakers as in production: contention is tried again.
PATIENT = {f"time_to_trigger_{name}_circuit_breaker": timedelta(seconds=30) for name in ("store", "fetch", "dispatch")}
#: The version that an older release made, and the columns that are new since then.
OLD = 4
NEW = {
    "delayed_messages_dispatchers": {"WorkedAt", "Problem", "Host", "DagId", "Reaches"},
    "delayed_messages_past": {"Tag", "Run", "DeliverConnId"},
}
NEW_TABLES = {f"delayed_messages_{name}" for name in ("rates", "history", "cancelled", "jobs")}


def old_version(store: Store, hook: DelayedStoreHook, count: int) -> None:
    """Make the tables as version 4 had them, and fill that of messages."""
    hook.dialect.allow_readers(hook.engine)
    for now in hook.tables:
        if now.name in NEW_TABLES:
            continue
        new = NEW.get(now.name, set())
        table = Table(
            now.name,
            MetaData(),
            *(
                Column(
                    one.name,
                    one.type,
                    primary_key=one.primary_key,
                    nullable=one.nullable,
                    autoincrement=one.autoincrement,
                    quote=True,
                )
                for one in now.columns
                if one.name not in new
            ),
            schema=now.schema,
            quote=True,
            quote_schema=True,
        )
        with hook.engine.begin() as connection:
            table.create(connection)
        for index in now.indexes:
            if new & {column.name for column in index.columns}:
                continue
            columns = ", ".join(f'"{column.name}"' for column in index.columns)
            unique = "UNIQUE " if index.unique else ""
            store.sql(hook, f'CREATE {unique}INDEX "{index.name}" ON {{s}}"{now.name}" ({columns})')
    with hook.engine.begin() as connection:
        rows = [to_row(message(f"m{number}", LATER), "broker") for number in range(count)]
        if rows:
            connection.execute(insert(hook.tables.messages), [{**row, "StoredAt": LATER} for row in rows])
        connection.execute(insert(hook.tables.version).values(Version=OLD, At=LATER))


def new_columns(hook: DelayedStoreHook) -> dict[str, set[str]]:
    there = {
        name: {column["name"] for column in inspect(hook.engine).get_columns(name, schema=hook.table.schema)}
        for name in NEW
    }
    return {name: there[name] & NEW[name] for name in NEW}


def versions(hook: DelayedStoreHook) -> list[int]:
    with hook.engine.connect() as connection:
        return sorted(connection.execute(select(hook.tables.version.c.Version)).scalars())


def test_tables_of_the_release_before_are_used_as_they_are(store: Store):
    hook = store.hook()
    old_version(store, hook, 30)
    report = hook.verify([])
    assert report.ok
    (finding,) = (one for one in report if one.code == "store-older")
    assert (finding.severity, finding.where) == ("warning", f"table {hook.table.fullname} version")
    schema = f" --schema {shlex.quote(store.schema)}" if store.schema else ""
    assert finding.remedy.endswith(f": airflow delayed upgrade --store-conn-id {store.conn_id}{schema}")
    assert hook.test_connection()[1].endswith(f"; the tables are of version {OLD}")
    # what is known is known
    same = hook.send(message(f"m{number}", LATER) for number in range(31))
    assert (same.sent, same.duplicates) == (1, 30)
    hook.send([message("due", PAST)])
    broker = Transport()
    assert store.dispatcher(hook, broker).run().dispatched == 1
    assert broker.ids == ["due"]
    (seen,) = hook.dispatchers()
    assert (seen.conn_ids, seen.worked_at, seen.problem) == (("broker",), None, None)
    assert hook.lookaheads() == {hook.conn_id: timedelta(0)}
    # notifiers
    hour = timedelta(hours=1)
    assert [arm(hook, PAST), arm(hook, PAST + hour), take_back(hook, PAST)] == ["stored", "joined", 0]
    assert [take_back(hook, PAST + hour), arm(hook, PAST)] == [1, "succeeded"]
    # of a message that has left, only what that version keeps
    assert [one.message_id for one in hook.page(state="dispatched", destination="q").remembered] == ["due"]
    with pytest.raises(DelayedError, match="upgrade the tables"):
        hook.page(state="dispatched", tag="t")
    # a cancel is final, and an erase reaches what it always did
    assert hook.cancel(["m1"]) == {"m1": "cancelled"}
    assert hook.get("m1").restorable_until is None
    assert hook.restore(["m1", "m2"]) == {"m1": "already cancelled", "m2": "already stored"}
    assert hook.restore(state="cancelled").counts == {}
    assert hook.erase(["m1", "m2"]).counts == {"erased": 2}
    assert hook.erase(due_from=LATER, limit=1).counts == {"erased": 1}
    # there are no rates yet
    assert hook.rates() == {}
    with pytest.raises(DelayedError, match="airflow delayed upgrade --store-conn-id"):
        hook.set_rates({"q": 5})
    # nor jobs
    assert hook.jobs() == []
    with pytest.raises(DelayedError, match="which has no jobs; upgrade them first"):
        hook.begin_job("cancel", {}, actor="op", tag="t")
    # the install task of a DAG makes what is missing, and upgrades nothing
    store.sql(hook, 'DROP TABLE {s}"delayed_messages_audit"')
    assert not hook.verify([]).ok
    states = [finding.state for finding in hook.install([])]
    assert (states.count(State.CREATED), states.count(State.WARNING), states.count(State.OK)) == (1, 1, 6)
    assert (versions(hook), new_columns(hook)) == ([OLD], {name: set() for name in NEW})


def test_an_upgrade_keeps_the_rows(store: Store):
    hook = store.hook()
    old_version(store, hook, 1500)
    (plan,) = (one for one in hook.install([], upgrade=True, dry_run=True) if one.state is not State.OK)
    assert str(plan) == f"table {hook.table.fullname} version: would repair, wanted {VERSION}, found {OLD}"
    assert versions(hook) == [OLD]
    (done,) = (one for one in hook.install([], upgrade=True) if one.state is not State.OK)
    assert (done.state, done.where) == (State.REPAIRED, plan.where)
    assert versions(hook) == [OLD, VERSION]
    assert new_columns(hook) == NEW
    assert [one.code for one in hook.verify([]) if one.code == "store-older"] == []
    assert [finding.state for finding in hook.install([], upgrade=True)] == [State.OK] * 11
    hook.set_rates({"q": 5})
    assert hook.rates() == {"q": 5}
    assert hook.count() == 1500
    same = hook.send(message(f"m{number}", LATER) for number in range(1501))
    assert (same.sent, same.duplicates) == (1, 1500)


def test_an_upgrade_that_was_cut_short_is_taken_up_again(store: Store):
    hook = store.hook()
    old_version(store, hook, 3)
    hook.install([], upgrade=True)
    # as if it had come to its end but for the last of its steps
    store.sql(hook, 'DROP TABLE {s}"delayed_messages_audit"')
    store.sql(hook, f'DELETE FROM {{s}}"delayed_messages_version" WHERE "Version" = {VERSION}')
    assert not hook.verify([]).ok
    hook.install([], upgrade=True)
    assert hook.verify([]).ok
    assert (versions(hook)[-1], hook.count()) == (VERSION, 3)


@pytest.mark.parametrize("store", ["postgres", "mariadb"], indirect=True)
def test_an_upgrade_waits_for_its_lock_only_briefly(store: Store):
    """A long transaction holds the upgrade up, and the upgrade holds up nobody behind it."""
    hook = store.hook()
    old_version(store, hook, 3)
    with ThreadPoolExecutor(1) as threads, hook.engine.connect() as long:
        long.execute(select(hook.tables.dispatchers.c.Id)).all()
        upgrade = threads.submit(store.hook().install, [], upgrade=True)
        for _ in range(5):
            assert store.dispatcher(hook, Transport()).run().dispatched == 0
        long.rollback()
        upgrade.result(120)
    assert versions(hook) == [OLD, VERSION]


def test_a_missing_index_is_made(store: Store):
    hook = store.hook()
    hook.install([])
    index = "delayed_messages_audit_At"
    on = ' ON {s}"delayed_messages_audit"' if hook.engine.dialect.name == "mysql" else ""
    schema = "" if on else "{s}"
    store.sql(hook, f'DROP INDEX {schema}"{index}"{on}')
    assert [one.where for one in hook.verify([]).problems] == [f"index {index}"]
    assert [one.where for one in hook.install([]) if one.state is State.CREATED] == [f"index {index}"]
    assert hook.verify([]).ok


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_an_index_that_an_interrupted_install_left_is_made_again(store: Store):
    hook = store.hook()
    hook.install([])
    store.sql(
        hook,
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid ="
        """ CAST('{s}"delayed_messages_audit_At"' AS regclass)""",
    )
    assert [one.where for one in hook.verify([]).problems] == ["index delayed_messages_audit_At"]
    hook.install([])
    assert hook.verify([]).ok


@pytest.mark.timeout(3000)
def test_nothing_is_lost_by_an_upgrade_at_full_work(store: Store):
    """A sender and two dispatchers are at work, on hooks that they opened on tables of the version before.

    The release before knows neither the new columns nor their reading; this one uses neither on tables of version 4,
    and its open hooks look at the version no more than those of that release did. So its code stands for both.
    """
    hook = store.hook()
    old_version(store, hook, 0)
    hook.send(message(f"m{number}", PAST) for number in range(ROWS // 2))
    brokers, stopped = [Transport(), Transport()], threading.Event()

    def dispatch(broker: Transport) -> None:
        dispatcher = store.dispatcher(store.hook(), broker, **PATIENT)
        dispatcher.run("empty")
        stopped.wait()
        dispatcher = store.dispatcher(store.hook(), broker, **PATIENT)
        dispatcher.run("empty")

    def send(sender: DelayedStoreHook) -> None:
        for first in range(ROWS // 2, ROWS, ROWS // 20):
            sender.send(message(f"m{number}", PAST) for number in range(first, first + ROWS // 20))

    with ThreadPoolExecutor(4) as threads:
        working = [threads.submit(dispatch, broker) for broker in brokers]
        sending = threads.submit(send, store.hook())
        try:
            store.hook().install([], upgrade=True)
            sending.result()
        finally:
            stopped.set()
        for each in working:
            each.result()
    sent = [*brokers[0].ids, *brokers[1].ids]
    assert (len(sent), len(set(sent)), hook.count()) == (ROWS, ROWS, 0)
    assert versions(hook) == [OLD, VERSION]
    assert hook.verify([]).ok


def test_a_store_that_is_too_old_is_an_error_that_says_what_to_run(store: Store):
    old_version(store, store.hook(), 1)
    store.sql(store.hook(), 'UPDATE {s}"delayed_messages_version" SET "Version" = 3')
    dispatch = StoreDispatchOperator(
        task_id="d", store_conn_id=store.conn_id, deliver_conn_ids="broker", schema=store.schema
    )
    hook = store.hook()
    for use in (
        lambda: hook.send([message("new", LATER)]),
        lambda: hook.conflicting({"m0": b""}),
        lambda: hook.known(["m0"]),
        lambda: hook.install([], upgrade=True),
        lambda: dispatch.execute({}),
    ):
        with pytest.raises(TopologyError, match=r"wanted 5, found 3.*too old.*with the release in between"):
            use()
    assert versions(hook) == [3]


def test_a_newer_store_is_left_alone(store: Store):
    hook = store.installed()
    hook.send([message("a", LATER)])
    with hook.engine.begin() as connection:
        connection.execute(update(hook.tables.version).values(Version=VERSION + 1))
    other = store.hook()
    for use in (lambda: other.install([]), lambda: other.send([message("b", LATER)])):
        with pytest.raises(
            TopologyError,
            match=rf"version: wanted {VERSION}, found {VERSION + 1}.*update airflow-provider-delayed here",
        ):
            use()
    (problem,) = other.verify([]).problems
    assert (problem.argument, problem.wanted, problem.found) == ("version", VERSION, VERSION + 1)
    assert versions(other) == [VERSION + 1]
    assert other.count() == 1


def test_a_table_of_others_is_no_older_one(store: Store):
    hook = store.hook()
    store.sql(hook, 'CREATE TABLE {s}"delayed_messages" ("Id" INTEGER)')
    with pytest.raises(TopologyError, match="column State: wanted"):
        hook.install([])
    with hook.engine.connect() as connection:
        assert [one["name"] for one in inspect(connection).get_columns("delayed_messages", schema=store.schema)] == [
            "Id"
        ]


@pytest.mark.parametrize("old", [0, OLD])
def test_several_install_at_once(store: Store, old):
    first = store.hook()
    if old:
        old_version(store, first, 50)
    errors = []

    def install() -> None:
        try:
            store.hook(None).install(["q"], create_destinations=True, upgrade=True)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=install) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    assert first.verify([]).ok
    assert versions(first) == ([old, VERSION] if old else [VERSION])
    with first.engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(first.table)).scalar() == (50 if old else 0)
    store.dispatcher(first, Transport()).run()
