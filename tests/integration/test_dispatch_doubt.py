"""A commit whose answer is lost, as when the network goes then: done or not, it counts once, and nothing is lost."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from sqlalchemy import Engine, event
from support.stores import Store, Transport, message

from airflow_delayed.store.dispatch.report import DispatchFailed

pytestmark = pytest.mark.mariadb

SECOND = timedelta(seconds=1)


def fail_commit(engine: Engine, monkeypatch, *, done: bool) -> list[str]:
    """Have the first commit of a transaction that moves failed messages fail: after it is done, or before."""
    real, error = engine.dialect.do_commit, engine.dialect.loaded_dbapi.OperationalError
    moving: set[int] = set()
    failed: list[str] = []

    @event.listens_for(engine, "after_cursor_execute")
    def look(connection, cursor, statement, *_: object) -> None:
        if statement.startswith("INSERT INTO") and "delayed_messages_failed" in statement.split("(")[0]:
            moving.add(threading.get_ident())

    def commit(connection) -> None:
        if failed or threading.get_ident() not in moving:
            real(connection)
            return
        failed.append("once")
        if done:
            real(connection)
        else:
            connection.rollback()
        raise error("the server has gone away")

    monkeypatch.setattr(engine.dialect, "do_commit", commit)
    return failed


@pytest.mark.parametrize("done", [True, False], ids=["done", "not done"])
@pytest.mark.parametrize("alone", [True, False], ids=["settled alone", "settled with a claim"])
def test_what_is_settled_again_after_a_commit_in_doubt_counts_once(store: Store, monkeypatch, caplog, done, alone):
    hook = store.installed()
    now = hook.now()
    hook.send(
        [
            message("good", now - SECOND),
            message("gone", now - SECOND, destination="gone"),
            message("late", now - SECOND, expires_at=now - SECOND / 2),
            message("refused", now - SECOND),
        ]
    )
    dispatcher = store.dispatcher(
        store.hook(),
        Transport(missing={"gone"}, refused={"refused"}),
        sleep=lambda seconds: None,
        database_time=lambda connection: now,
        time_to_trigger_store_circuit_breaker=30 * SECOND,
        # what may have to wait for its turn is settled before
        max_rate=1000 if alone else None,
    )
    failed = fail_commit(store.hooks[-1].engine, monkeypatch, done=done)
    with pytest.raises(DispatchFailed, match="message gone: "):
        dispatcher.run()
    assert failed == ["once"]
    warnings = [record for record in caplog.records if "the server has gone away" in record.getMessage()]
    assert [record.levelname for record in warnings] == ["WARNING"]
    assert {name: failure[:2] for name, failure in store.given_up(hook).items()} == {
        "gone": ("failed", 1),
        "late": ("expired", 0),
    }
    assert store.failures_of(hook) == {"refused": 1}
    assert store.past(hook) == {"good": "dispatched"}
    counts = dispatcher.report
    assert (counts.dispatched, counts.failed, counts.expired, counts.retried) == (1, 1, 1, 1)
