"""Any order of storing, cancelling, dispatching, faults and time: the store does what a dictionary would."""

from __future__ import annotations

import tempfile
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sqlalchemy import create_engine
from support.stores import Transport, message

from airflow_delayed.errors import MessageConflict
from airflow_delayed.store import claims, storing
from airflow_delayed.store.dispatch import Dispatcher
from airflow_delayed.store.engine import engine_options, prepare
from airflow_delayed.store.report import DispatchFailed
from airflow_delayed.store.schema import store_tables

START = datetime(2030, 1, 1, tzinfo=timezone.utc)
NAMES = st.sampled_from([f"m{n}" for n in range(6)] + ["M0"])
MINUTES = st.integers(0, 30)


def minutes(count: float) -> timedelta:
    return timedelta(minutes=count)


class StoreMachine(RuleBasedStateMachine):
    """``rows`` is the model: id -> (message, delivering connection, failures)."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        url = f"sqlite:///{Path(self.folder.name) / 'model.db'}"
        self.engine = prepare(create_engine(url, **engine_options("sqlite")))
        self.tables = store_tables()
        self.table = self.tables.messages
        for table in self.tables:
            table.create(self.engine)
        self.now = START
        self.rows: dict[str, tuple] = {}

    def teardown(self) -> None:
        self.engine.dispose()
        self.folder.cleanup()

    @rule(by=MINUTES)
    def time_passes(self, by):
        self.now += minutes(by)

    @rule(
        names=st.lists(NAMES, min_size=1, max_size=4),
        due=MINUTES,
        body=st.sampled_from([b"one", b"two"]),
        lives=st.none() | st.integers(1, 20),
        destination=st.sampled_from(["good", "gone"]),
        conn_id=st.sampled_from(["broker", "broker", "other"]),
    )
    def store(self, names, due, body, lives, destination, conn_id):
        expires = None if lives is None else START + minutes(due + lives)
        messages = [
            message(name, START + minutes(due), body=body, destination=destination, expires_at=expires)
            for name in names
        ]
        clash = any(one.message_id in self.rows and self.rows[one.message_id][:2] != (one, conn_id) for one in messages)
        if clash:
            with pytest.raises(MessageConflict):
                storing.store(self.engine, self.tables, messages, conn_id)
            return
        report = storing.store(self.engine, self.tables, messages, conn_id)
        new = {one.message_id for one in messages} - self.rows.keys()
        assert (report.sent, report.duplicates) == (len(new), len(messages) - len(new))
        for one in messages:
            self.rows.setdefault(one.message_id, (one, conn_id, 0))

    @rule(names=st.sets(NAMES))
    def cancel(self, names):
        outcomes = storing.cancel(self.engine, self.table, names)
        assert outcomes == {name: "cancelled" if name in self.rows else "absent" for name in names}
        for name in names:
            self.rows.pop(name, None)

    @rule(
        lookahead=MINUTES,
        horizon=st.sampled_from([0, 10, 60]),
        batch_size=st.sampled_from([1, 2, 500]),
        gone=st.booleans(),
        refused=st.sets(NAMES, max_size=2),
    )
    def dispatch(self, lookahead, horizon, batch_size, gone, refused):
        transport = Transport(minutes(horizon), missing={"gone"} if gone else set(), refused=refused)
        due = self._due(min(lookahead, horizon))
        bad = {name for name in due if name in refused or (gone and due[name].destination == "gone")}
        report, failed = self._run(transport, lookahead, batch_size)
        assert sorted(transport.ids) == sorted(due.keys() - bad)
        assert all(transport.sent[n] == due[transport.ids[n]] for n in range(len(transport.sent)))
        assert report.dispatched == len(transport.sent)
        assert refused & due.keys() <= failed | {name for name in bad if due[name].destination == "gone"}
        assert failed <= bad
        assert bool(failed) == bool(bad)
        end = self.now + minutes(lookahead)
        assert report.left == sum(conn == "other" and one.due_at <= end for one, conn, _ in self.rows.values())
        assert report.expired == sum(conn == "broker" and self._expired(one) for one, conn, _ in self.rows.values())
        for name in transport.ids:
            del self.rows[name]
        for name in failed:
            one, conn, failures = self.rows[name]
            self.rows[name] = (one, conn, failures + 1)

    @rule(lost_after=st.integers(0, 3), counts=st.booleans(), batch_size=st.sampled_from([1, 2, 500]))
    def lose_the_broker(self, lost_after, counts, batch_size):
        transport = Transport(lost_after=lost_after, counts_when_lost=counts)
        due = self._due(0)
        report, failed = self._run(transport, 0, batch_size)
        assert failed == set()
        assert set(transport.ids) <= due.keys()
        assert len(set(transport.ids)) == len(transport.ids)
        # removed is only what the transport had told to be confirmed
        left = {one.message_id for one in storing.listed(self.engine, self.table)}
        gone = self.rows.keys() - left
        assert gone <= set(transport.ids)
        assert len(gone) == report.dispatched
        for name in gone:
            del self.rows[name]

    @invariant()
    def holds_what_the_model_holds(self):
        listed = list(storing.listed(self.engine, self.table))
        wanted = sorted(self.rows.values(), key=lambda row: (row[0].due_at, row[0].message_id))
        assert [
            (one.message_id, one.destination, one.due_at, one.expires_at, one.deliver_conn_id, one.retry_count)
            for one in listed
        ] == [
            (one.message_id, one.destination, one.due_at, one.expires_at, conn, failures)
            for one, conn, failures in wanted
        ]
        with closing(self.engine.connect()) as connection:
            assert claims.count(connection, self.table) == len(self.rows)

    def _expired(self, one) -> bool:
        return one.expires_at is not None and one.expires_at <= self.now

    def _due(self, window: float) -> dict:
        end = self.now + minutes(window)
        rows = self.rows.items()
        return {
            name: one
            for name, (one, conn, _) in rows
            if conn == "broker" and one.due_at <= end and not self._expired(one)
        }

    def _run(self, transport, lookahead, batch_size):
        def transports(conn_id, clock):
            transport.clock = clock
            return transport

        dispatcher = Dispatcher(
            self.engine,
            self.table,
            conn_id="store",
            transports=transports,
            deliver_conn_ids=["broker"],
            lookahead=minutes(lookahead),
            batch_size=batch_size,
            database_time=lambda connection: self.now,
        )
        try:
            return dispatcher.run(), set()
        except DispatchFailed as error:
            return error.report, set(error.failures)


StoreMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestStore = StoreMachine.TestCase
