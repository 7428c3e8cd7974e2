"""A dispatcher whose work in the store fails or stands still, while its sign of life works: it ends, and says why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from threading import Thread
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import pytest
from sqlalchemy import event, select
from sqlalchemy.exc import DBAPIError
from support.proxy import Proxy, proxy
from support.rabbitmq import eventually
from support.stores import Store, Transport, choose_driver, message

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.dispatch.report import BreakerTripped

pytestmark = pytest.mark.mariadb

SECOND = timedelta(seconds=1)

_FORBID = {
    "sqlite": [
        "CREATE TRIGGER forbid BEFORE DELETE ON {s}\"delayed_messages\" BEGIN SELECT RAISE(ABORT, 'no room'); END"
    ],
    "postgresql": [
        "CREATE FUNCTION {s}no_room() RETURNS trigger AS $$ BEGIN RAISE EXCEPTION 'no room'; END $$ LANGUAGE plpgsql",
        'CREATE TRIGGER forbid BEFORE DELETE ON {s}"delayed_messages" FOR EACH ROW EXECUTE FUNCTION {s}no_room()',
    ],
    "mysql": [
        'CREATE TRIGGER {s}forbid BEFORE DELETE ON {s}"delayed_messages" FOR EACH ROW'
        " SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no room'"
    ],
}
_ALLOW = {
    "sqlite": ["DROP TRIGGER {s}forbid"],
    "postgresql": ["DROP FUNCTION {s}no_room() CASCADE"],
    "mysql": ["DROP TRIGGER {s}forbid"],
}


def forbid_removal(store: Store, hook: DelayedStoreHook) -> None:
    """Let each removal of a message fail, which is how a dispatcher settles."""
    for statement in _FORBID[hook.engine.dialect.name]:
        store.sql(hook, statement)


def allow_removal(store: Store, hook: DelayedStoreHook) -> None:
    for statement in _ALLOW[hook.engine.dialect.name]:
        store.sql(hook, statement)


def test_what_fails_ends_the_run_although_the_sign_of_life_works(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("airflow_delayed.store.dispatch.dispatcher.HEARTBEAT", 0.05)
    hook = store.installed()
    hook.send(message(f"m{n}", hook.now() - SECOND) for n in range(5))
    forbid_removal(store, hook)
    dispatcher = store.dispatcher(store.hook(), Transport(), time_to_trigger_store_circuit_breaker=SECOND)
    with pytest.raises(BreakerTripped, match=r"what became of messages has failed since .* \(limit 1 s\).*no room"):
        dispatcher.run()
    allow_removal(store, hook)
    assert dispatcher.report.dispatched == 0
    assert hook.count() == 5


def test_a_dispatcher_that_fails_says_so_until_it_works(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("airflow_delayed.store.dispatch.dispatcher.HEARTBEAT", 0.05)
    hook = store.installed()
    hook.send(message(f"m{n}", hook.now() - SECOND) for n in range(5))
    forbid_removal(store, hook)
    dispatcher = store.dispatcher(store.hook(), Transport(), time_to_trigger_store_circuit_breaker=60 * SECOND)
    running = Thread(target=dispatcher.once, daemon=True)
    running.start()
    # before its first sign of life there is another finding
    eventually(lambda: "dispatcher-fails" in {finding.code for finding in hook.health()})
    (finding,) = hook.verify([]).problems
    assert (finding.code, finding.severity) == ("dispatcher-fails", "error")
    assert "at work, and has achieved nothing since" in finding.what
    assert "no room" in finding.what
    allow_removal(store, hook)
    running.join(60)
    eventually(lambda: not hook.health())
    (seen,) = hook.dispatchers()
    assert seen.worked_at >= seen.started_at
    dispatcher.close()


def test_leases_that_end_while_messages_are_sent_are_reported(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("airflow_delayed.store.dispatch.dispatcher.HEARTBEAT", 0.05)
    hook, jump = store.installed(), [0.0]
    hook.send([message("m", hook.now() - SECOND)])

    class Slow(Transport):
        def send(self, messages):
            report = super().send(messages)
            jump[0] = 31.0
            return report

    dispatcher = store.dispatcher(store.hook(), Slow(), monotonic=lambda: jump[0])
    dispatcher.once()
    eventually(hook.health)
    (finding,) = hook.health()
    assert (finding.code, finding.severity) == ("lease-too-short", "warning")
    assert "1 messages" in finding.what
    assert "claim_timeout is 30 s" in finding.what
    dispatcher.close()
    assert hook.health() == []


def test_what_was_sent_before_the_breaker_tripped_is_counted(store: Store, caplog: pytest.LogCaptureFixture):
    """The end of a run tries once more to settle it; here that works again by then."""
    caplog.set_level(logging.INFO, "airflow_delayed")
    hook, working = store.installed(), store.hook()
    hook.send(message(f"m{n}", hook.now() - SECOND + n * SECOND / 100) for n in range(60))
    forbid_removal(store, hook)
    failures = []
    event.listen(working.engine, "rollback", failures.append)

    class Slow(Transport):
        def send(self, messages):
            report = super().send(messages)
            if len(self.ids) > 2:
                # together with a claim, and alone: then the breaker has tripped
                eventually(lambda: len(failures) >= 2)
                allow_removal(store, hook)
            return report

    transport = Slow()
    dispatcher = store.dispatcher(working, transport, batch_size=2)
    with pytest.raises(BreakerTripped, match="no room"):
        dispatcher.run()
    assert len(transport.ids) > 2
    assert dispatcher.report.dispatched == len(transport.ids) == 60 - hook.count()
    assert f"{len(transport.ids)} messages dispatched" in caplog.text


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds in place of half a minute."""
    monkeypatch.setattr("airflow_delayed.store.engine.REPORT_AFTER", 0.5)
    monkeypatch.setattr("airflow_delayed.store.engine.END_AFTER", 2.0)
    monkeypatch.setattr("airflow_delayed.store.network.CONNECT_SECONDS", 2)


@pytest.fixture(params=["psycopg", "psycopg2", "mysqlclient", "mysql-connector-python"])
def behind_proxy(
    request: pytest.FixtureRequest, connect, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Proxy, DelayedStoreHook]]:
    """A store whose database is reached through a proxy, by each driver."""
    choose_driver(monkeypatch, request.param)
    postgres = request.param.startswith("psycopg")
    url = urlsplit(request.getfixturevalue("postgres_url" if postgres else "mariadb_url"))
    extra = {} if postgres else {"client": request.param}
    table = f"standstill_{uuid4().hex[:8]}"
    with proxy(url.port, url.hostname) as between:
        conn_id = connect(
            "behind_proxy",
            conn_type="postgres" if postgres else "mysql",
            host="127.0.0.1",
            port=between.port,
            login=unquote(url.username or ""),
            password=unquote(url.password or ""),
            schema=url.path[1:],
            extra=extra,
        )
        with closing(DelayedStoreHook(conn_id, "broker", table=table)) as hook:
            hook.install([])
            yield between, hook
            between.go_on()
            hook.close()
            with hook.engine.begin() as connection:
                hook.table.metadata.drop_all(connection)


def test_a_database_that_falls_silent_is_logged_and_given_up(
    behind_proxy: tuple[Proxy, DelayedStoreHook], short_limits: None, caplog: pytest.LogCaptureFixture
):
    """TCP works all the time, as with a frozen server: only the answers do not come."""
    caplog.set_level(logging.INFO, "airflow_delayed")
    between, hook = behind_proxy
    names = [f"m{n}" for n in range(20)]
    hook.send(message(name, hook.now() - SECOND) for name in names)

    class Silencing(Transport):
        def send(self, messages):
            report = super().send(messages)
            # the answers of the connections that there are never come; new ones work again
            if len(self.ids) <= 5:
                between.fall_silent()
            return report

    transport = Silencing()
    dispatcher = Store(hook.conn_id, None).dispatcher(
        hook,
        transport,
        batch_size=5,
        claim_timeout=20 * SECOND,
        time_to_trigger_store_circuit_breaker=30 * SECOND,
        time_to_trigger_fetch_circuit_breaker=30 * SECOND,
    )
    assert dispatcher.run("empty").dispatched == 20
    assert set(transport.ids) == set(names)
    assert "has had no answer from the database for" in caplog.text
    assert ("its connection was ended" in caplog.text) == (hook.engine.dialect.name == "postgresql")


@pytest.mark.parametrize(
    "behind_proxy", ["psycopg2", pytest.param("mysqlclient", marks=pytest.mark.long)], indirect=True
)
def test_a_frozen_database_that_goes_on_loses_nothing(
    behind_proxy: tuple[Proxy, DelayedStoreHook], short_limits: None, caplog: pytest.LogCaptureFixture
):
    between, hook = behind_proxy
    names = [f"m{n}" for n in range(20)]
    hook.send(message(name, hook.now() - SECOND) for name in names)

    def thaw() -> None:
        eventually(lambda: "tried again" in caplog.text)
        between.go_on()

    class Freezing(Transport):
        def send(self, messages):
            report = super().send(messages)
            if len(self.ids) <= 5:
                between.hang()
                Thread(target=thaw, daemon=True).start()
            return report

    transport = Freezing()
    limits = {f"time_to_trigger_{name}_circuit_breaker": 30 * SECOND for name in ("store", "fetch")}
    dispatcher = Store(hook.conn_id, None).dispatcher(hook, transport, batch_size=5, **limits)
    dispatcher.run("empty")
    assert set(transport.ids) == set(names)
    assert "has had no answer from the database for" in caplog.text


@pytest.mark.parametrize(
    "behind_proxy", ["psycopg2", pytest.param("mysqlclient", marks=pytest.mark.long)], indirect=True
)
def test_a_frozen_database_ends_the_run(
    behind_proxy: tuple[Proxy, DelayedStoreHook], short_limits: None, caplog: pytest.LogCaptureFixture
):
    between, hook = behind_proxy
    hook.send(message(f"m{n}", hook.now() - SECOND) for n in range(5))

    class Freezing(Transport):
        def send(self, messages):
            report = super().send(messages)
            between.hang()
            return report

    dispatcher = Store(hook.conn_id, None).dispatcher(
        hook, Freezing(), time_to_trigger_store_circuit_breaker=SECOND, time_to_trigger_fetch_circuit_breaker=SECOND
    )
    with pytest.raises(BreakerTripped, match=r"has failed since"):
        dispatcher.run()
    assert "has had no answer from the database for" in caplog.text


@pytest.mark.parametrize("store", ["postgres", "mariadb"], indirect=True)
def test_who_stands_still_within_a_transaction_keeps_no_message(store: Store, monkeypatch: pytest.MonkeyPatch):
    """As a dispatcher does that is frozen while it claims; its machine goes on to answer for it."""
    hook, frozen = store.installed(), store.hook()
    hook.send([message("m", hook.now() - SECOND)])
    with monkeypatch.context() as short:
        # of this connection alone
        short.setattr("airflow_delayed.store.network.IDLE_SECONDS", 2)
        standing = frozen.engine.connect()
    with closing(standing) as connection:
        connection.execute(select(frozen.tables.messages).with_for_update())
        eventually(lambda: store.dispatcher(hook, Transport()).run().dispatched == 1, 120)
        with pytest.raises(DBAPIError):
            connection.execute(select(1))
