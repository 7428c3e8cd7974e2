"""Taking over the table of NServiceBus's store, or of another one."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from contextlib import closing
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import Column, MetaData, String, Table, delete, select
from support.adopting import adopt
from support.forked import Child
from support.msmq import fill, headers_xml, row, timeouts_table
from support.rabbitmq import virtual_host
from support.stores import Store, Transport, message, on_postgres_only

from airflow_delayed.errors import SourceError, TopologyError, UnsupportedColumns
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.operators.dispatch import StoreDispatchOperator

pytestmark = pytest.mark.long

SECOND = timedelta(seconds=1)
TABLE = "Sales.timeouts"


@pytest.fixture(name="hook")
def hook_fixture(store: Store):
    return store.installed()


@pytest.fixture(name="timeouts")
def timeouts_fixture(store: Store, hook) -> Table:
    table = timeouts_table(TABLE, store.schema)
    table.create(hook.engine)
    return table


def left(hook, table: Table) -> list[str]:
    with hook.engine.connect() as connection:
        return sorted(connection.execute(select(table.c.Id)).scalars())


def dispatched(store: Store, hook, **options):
    transport = Transport()
    store.dispatcher(hook, transport, lookahead=timedelta(days=1), **options).run()
    return {one.message_id: one for one in transport.sent}


def test_all_that_a_row_says_is_taken_over(store: Store, hook, timeouts):
    now = hook.now().replace(microsecond=3000)
    native = r"7d0c1f3e-6f0c-4d0f-9a63-1f2a7c0e4d11\12345"
    fill(
        hook.engine,
        timeouts,
        [
            row(native, now + SECOND, {"a": "<b> \u00fc \x19", "null": None, "empty": ""}, RetryCount=3),
            row("empty", now, State=None, Destination="Billing"),
        ],
    )
    assert hook.adopt(table=TABLE, schema=store.schema, dry_run=True).summary() == {
        "adopted": 2,
        "duplicates": 0,
        "failed": 0,
        "remaining": 0,
        "by_destination": {"Billing": 1, "Sales": 1},
        "first_due": now.isoformat(),
        "last_due": (now + SECOND).isoformat(),
    }
    assert (hook.count(), left(hook, timeouts)) == (0, sorted([native, "empty"]))
    report = hook.adopt(table=TABLE, schema=store.schema)
    assert (report.adopted, report.by_destination, report.remaining) == (2, {"Sales": 1, "Billing": 1}, 0)
    assert left(hook, timeouts) == []
    assert store.failures_of(hook) == {native: 3, "empty": 0}
    sent = dispatched(store, hook)
    assert sent[native] == message(
        native,
        now + SECOND,
        destination="Sales",
        headers={
            "NServiceBus.MessageId": f"logical-{native}",
            "NServiceBus.EnclosedMessageTypes": "Acme.Reminder, Acme.Messages",
            "a": "<b> \u00fc \x19",
            "empty": "",
            "CorrId": "",
        },
    )
    assert (sent["empty"].body, sent["empty"].destination) == (b"", "Billing")


def test_other_names_and_json(store: Store, hook):
    names = {"Id": 'the "id"', "State": "body", "Time": "due", "RetryCount": "tries"}
    table = timeouts_table('a "table"', store.schema, **names)
    table.create(hook.engine)
    now = hook.now()
    fill(hook.engine, table, [row("a", now, Headers=b'{"a": "\xc3\xbc"}', Destination="a@b", RetryCount=1)])
    arguments = {"table": 'a "table"', "schema": store.schema, "headers": "json", "destination_of": str.upper}
    with pytest.raises(
        UnsupportedColumns, match=r"has no column 'Id'; it has .*Say which of them it is: columns={'Id'"
    ):
        hook.adopt(**arguments)
    assert hook.adopt(**arguments, columns=names).adopted == 1
    assert store.failures_of(hook) == {"a": 1}
    (sent,) = dispatched(store, hook).values()
    assert sent == message("a", now, destination="A@B", headers={"a": "\u00fc"})


def test_what_cannot_be_read_stays_and_does_not_hold_up_the_others(store: Store, hook, timeouts, caplog):
    now = hook.now()
    bad = {
        "no destination": {"Destination": None},
        "bad-xml": {"Headers": b"<hush"},
        "no-time": {"Time": None},
        "x" * 129: {},
        "no-name": {"Headers": headers_xml({"": "hush"})},
    }
    rows = [row(f"m{n}", now + n * SECOND) for n in range(25)]
    fill(hook.engine, timeouts, [*rows, *(row(name, now - SECOND, **columns) for name, columns in bad.items())])
    for dry_run in (True, False):
        report = hook.adopt(table=TABLE, schema=store.schema, batch_size=10, dry_run=dry_run)
        assert report.adopted == 25
        assert report.failures == {
            "no destination": "destination: is null or not text: there is nowhere to send it",
            "bad-xml": "headers: are not XML: unclosed token, line 1, column 0",
            "no-time": "due_at: is null: it says not when it is due",
            "x" * 129: "message_id: must be text of 1 to 128 characters",
            "no-name": "headers: the name '' must be text that is not empty",
        }
    assert left(hook, timeouts) == sorted(bad)
    assert report.remaining == 0
    assert hook.count() == 25
    assert "5 rows stay where they are" in caplog.text
    assert "hush" not in caplog.text


def test_an_id_of_ours_with_other_content_stays(store: Store, hook, timeouts):
    now = hook.now()
    fill(hook.engine, timeouts, [row("a", now), row("b", now)])
    hook.send([message("a", now)])
    for _ in range(2):
        report = hook.adopt(table=TABLE, schema=store.schema)
        assert report.failures == {"a": "our store has this id with other content"}
        assert left(hook, timeouts) == ["a"]
    assert dispatched(store, hook)["a"].body == b"body of a"


def test_a_thousand_rows_that_cannot_be_read_end_a_run(store: Store, hook, timeouts):
    now = hook.now()
    fill(hook.engine, timeouts, (row(f"m{n}", now, Destination=None) for n in range(1010)))
    report = hook.adopt(table=TABLE, schema=store.schema)
    assert (len(report.failures), report.remaining) == (1000, 10)


def test_what_another_dispatcher_holds_is_passed_over(store: Store, hook, timeouts):
    """On SQLite, which has no locks of rows, one that was changed meanwhile stays."""
    now = hook.now()
    fill(hook.engine, timeouts, [row(f"m{n}", now + n * SECOND) for n in range(6)])
    theirs = timeouts.c.Id == "m0"
    if hook.engine.dialect.name == "sqlite":

        class Changing(type(hook)):
            def send(self, messages):
                report = super().send(messages)
                with self.engine.begin() as connection:
                    connection.execute(timeouts.update().where(theirs).values(RetryCount=1, State=b"changed"))
                return report

        changing = Changing(hook.conn_id, "broker")
        report = changing.adopt(table=TABLE)
        changing.close()
        # it came again in a second batch, as another message than the one that was stored
        assert report.failures == {"m0": "our store has this id with other content"}
        assert report.adopted == 6
    else:
        with hook.engine.begin() as other:
            other.execute(select(timeouts.c.Id).where(theirs).with_for_update())
            report = hook.adopt(table=TABLE, schema=store.schema, batch_size=2)
        assert (report.adopted, report.failures, report.remaining) == (5, {}, 1)
    assert left(hook, timeouts) == ["m0"]


@pytest.mark.parametrize("store", ["postgres", "mariadb"], indirect=True)
def test_side_by_side_with_a_dispatcher_of_the_other_store(store: Store, hook, timeouts):
    """It takes one row at a time, as SqlServerDelayedMessageStore does; each message is delivered by one of the two."""
    names = [f"m{n:03}" for n in range(300)]
    fill(hook.engine, timeouts, (row(name, hook.now()) for name in names))
    delivered: list[str] = []
    first = select(timeouts.c.Id).order_by(timeouts.c.Time).limit(1).with_for_update(skip_locked=True)
    begun, done = threading.Event(), threading.Event()

    def dispatch() -> None:
        found = None
        while found or not done.is_set():
            with hook.engine.begin() as connection:
                if found := connection.execute(first).scalar():
                    begun.set()
                    delivered.append(found)
                    connection.execute(delete(timeouts).where(timeouts.c.Id == found))

    other = threading.Thread(target=dispatch)
    other.start()
    assert begun.wait(60)
    report = hook.adopt(table=TABLE, schema=store.schema, batch_size=10)
    done.set()
    other.join(60)
    assert report.adopted == len(list(hook.list())) > 0
    assert sorted([*delivered, *(one.message_id for one in hook.list())]) == names


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"table": "no such"}, SourceError, "no such is not there"),
        ({"table": "delayed_messages"}, SourceError, "is a store of this package already"),
        ({"table": "delayed_messages_failed"}, SourceError, "is a store of this package already"),
        ({"table": "plain"}, SourceError, "'Id' is neither the primary key nor unique"),
        ({"columns": {"id": "Id"}}, ValueError, "names id; it translates Id, Destination"),
        ({"headers": "soap"}, ValueError, "'soap' must be one of xml, json"),
        ({"batch_size": 0}, ValueError, "batch_size=0 must be 1 to 1000"),
    ],
)
def test_what_cannot_be_taken_over(store: Store, hook, timeouts, arguments, error, text):
    names = ("Id", "Destination", "State", "Time", "Headers", "RetryCount")
    plain = Table("plain", MetaData(), *(Column(name, String(9), quote=True) for name in names), schema=store.schema)
    plain.create(hook.engine)
    hook.send([message("ours", hook.now())])
    with pytest.raises(error, match=text):
        hook.adopt(**{"table": TABLE, "schema": store.schema, **arguments})
    assert hook.count() == 1


@pytest.mark.parametrize("on_conflict", ["keep", "replace"])
def test_what_is_ours_is_neither_replaced_nor_taken_for_theirs(store: Store, hook, timeouts, on_conflict):
    with pytest.raises(ValueError, match=f"on_conflict='{on_conflict}': a row of an id"):
        store.hook(on_conflict=on_conflict).adopt(table=TABLE, schema=store.schema)


def test_without_a_store_nothing_is_taken_over(store: Store):
    hook = store.hook()
    table = timeouts_table(TABLE, store.schema)
    table.create(hook.engine)
    fill(hook.engine, table, [row("a", datetime.now(timezone.utc))])
    with pytest.raises(TopologyError, match="delayed_messages"):
        hook.adopt(table=TABLE, schema=store.schema)
    assert left(hook, table) == ["a"]


def killed(store: Store, moment: str) -> None:
    """Take the table over in a process that is killed at a moment."""
    with closing(
        Child(adopt, moment=moment, conn_id=store.conn_id, schema=store.schema, table=TABLE, batch_size=20)
    ) as child:
        assert child.ended() == -signal.SIGKILL


@on_postgres_only
def test_from_nservicebus_to_rabbitmq_killed_again_and_again(store: Store, hook, timeouts, rabbitmq_url, connect):
    """Sent, arrived, twice, lost, early."""
    with virtual_host(rabbitmq_url) as vhost:
        connect("broker", **vhost.connection_with(topology="nservicebus", routing="direct"))
        RabbitMQDelayHook("broker").install(["Sales"], create_destinations=True)
        now = hook.now()
        names = [f"m{n:03}" for n in range(150)]
        due = {name: now + n * SECOND / 20 for n, name in enumerate(names)}
        fill(hook.engine, timeouts, (row(name, due[name]) for name in names))
        dispatch = StoreDispatchOperator(
            task_id="dispatch", store_conn_id=store.conn_id, deliver_conn_ids="broker", schema=store.schema
        )
        sent: set[str] = set()
        for moment, both in (("read", 0), ("stored", 20), ("deleted", 20)):
            killed(store, moment)
            theirs, ours = set(left(hook, timeouts)), {one.message_id for one in hook.list()}
            assert theirs | ours | sent == set(names)
            assert len(theirs & ours) == both
            # some are sent that are in their table still, and then met there again
            dispatch.execute({})
            sent |= ours
        report = hook.adopt(table=TABLE, schema=store.schema, batch_size=20)
        assert (left(hook, timeouts), report.remaining, report.failures) == ([], 0, {})
        assert report.duplicates == 20
        dispatch.execute({})
        assert hook.count() == 0
        arrivals = vhost.collect("Sales", enough=names)
    arrived = Counter(one.message_id for one in arrivals)
    lost, twice = set(names) - set(arrived), [name for name, count in arrived.items() if count > 1]
    early = [one.message_id for one in arrivals if one.received_at < due[one.message_id]]
    assert (len(arrived), twice, lost, early) == (150, [], set(), [])
    for one in arrivals:
        assert one.body == b"body of " + one.message_id.encode()
        assert one.properties.type == "Acme.Reminder"
        assert one.properties.headers["NServiceBus.MessageId"] == f"logical-{one.message_id}"
        assert one.properties.headers["NServiceBus.EnclosedMessageTypes"] == "Acme.Reminder, Acme.Messages"
        assert not any(name.startswith("NServiceBus.Timeouts") for name in one.properties.headers)
