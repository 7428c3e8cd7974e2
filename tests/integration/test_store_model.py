"""Any order of storing, cancelling, dispatching, faults and time: the store does what a dictionary would."""

from __future__ import annotations

import tempfile
from contextlib import closing
from datetime import datetime, timedelta, timezone
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sqlalchemy import select
from support.stores import Transport, message
from support.table_pools import store_file

from airflow_delayed.errors import MessageConflict
from airflow_delayed.store import queries
from airflow_delayed.store.api import Outcome
from airflow_delayed.store.bulk_changes import BulkChanges
from airflow_delayed.store.changes import Cancel
from airflow_delayed.store.dispatch import claim
from airflow_delayed.store.dispatch.dispatcher import Dispatcher
from airflow_delayed.store.dispatch.report import DispatchFailed
from airflow_delayed.store.enqueue import enqueue
from airflow_delayed.store.filters import MessageFilter

START = datetime(2030, 1, 1, tzinfo=timezone.utc)
NAMES = st.sampled_from([f"m{n}" for n in range(20)] + ["M0"])
RETRIES = 1
MINUTES = st.integers(0, 30)


def minutes(count: float) -> timedelta:
    return timedelta(minutes=count)


class StoreMachine(RuleBasedStateMachine):
    """``rows`` is the model: id -> (message, delivering connection, failures)."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.engine, self.tables = store_file(Path(self.folder.name) / "model.db")
        self.table = self.tables.messages
        self.now = START
        self.rows: dict[str, tuple] = {}
        #: Given up, or expired: id -> reason, failures.
        self.failed: dict[str, tuple[str, int]] = {}
        #: Leased by a dispatcher that was killed: id -> until when.
        self.leased: dict[str, datetime] = {}
        #: Not tried again before: id -> when.
        self.waits: dict[str, datetime] = {}
        self.dispatched: set[str] = set()
        #: What each id stands for that was ever stored, and who delivers it.
        self.said: dict[str, tuple] = {}

    def teardown(self) -> None:
        self.engine.dispose()
        self.folder.cleanup()

    @rule(by=st.sampled_from([0.01, 0.02, 0.3, 0.6, 1, 5, 20]))
    def time_passes(self, by):
        self.now += minutes(by)

    @rule(
        names=st.lists(NAMES, min_size=1, max_size=4),
        due=MINUTES,
        body=st.sampled_from([b"one", b"two"]),
        lives=st.none() | st.integers(1, 20),
        destination=st.sampled_from(["good", "gone"]),
        conn_id=st.sampled_from(["broker", "broker", "other"]),
        on_conflict=st.sampled_from(["error", "keep", "replace"]),
    )
    def store(self, names, due, body, lives, destination, conn_id, on_conflict):
        expires = None if lives is None else START + minutes(due + lives)
        messages = [
            message(name, START + minutes(due), body=body, destination=destination, expires_at=expires)
            for name in names
        ]
        fates = {one.message_id: self._fate(one, conn_id, on_conflict) for one in messages}
        if "clash" in fates.values():
            with pytest.raises(MessageConflict):
                enqueue(self.engine, self.tables, messages, conn_id, on_conflict=on_conflict)
            return
        report = enqueue(self.engine, self.tables, messages, conn_id, on_conflict=on_conflict)
        counted = [list(fates.values()).count(fate) for fate in ("new", "replaced", "not_replaced")]
        assert [report.sent, report.replaced, report.not_replaced] == counted
        assert report.duplicates == len(messages) - sum(counted)
        for one in messages:
            if fates[one.message_id] in ("new", "replaced"):
                for known in (self.waits, self.leased, self.failed):
                    known.pop(one.message_id, None)
                self.rows[one.message_id] = (one, conn_id, 0)
                self.said[one.message_id] = (one, conn_id)

    def _fate(self, one, conn_id, on_conflict) -> str:
        name = one.message_id
        if name not in self.said:
            return "new"
        is_past = name not in self.rows and name not in self.failed
        said, delivers = self.said[name]
        if said == one and (is_past or delivers == conn_id):
            return "duplicate"
        if on_conflict == "error":
            return "duplicate" if is_past and name not in self.dispatched else "clash"
        if on_conflict == "keep":
            return "duplicate"
        return "not_replaced" if is_past or self._is_leased(name) else "replaced"

    def _is_leased(self, name) -> bool:
        return name in self.leased and self.leased[name] > self.now

    @rule(names=st.sets(NAMES))
    def cancel(self, names):
        wanted = {}
        for name in names:
            if name in self.rows or name in self.failed:
                wanted[name] = Outcome.IN_FLIGHT if self._is_leased(name) else Outcome.CANCELLED
            elif name in self.dispatched:
                wanted[name] = Outcome.DISPATCHED
            else:
                wanted[name] = Outcome.ALREADY_CANCELLED if name in self.said else Outcome.ABSENT
        clock = {"sleep": lambda seconds: None, "monotonic": count().__next__}
        operations = BulkChanges(self.engine, self.tables, database_time=lambda connection: self.now, **clock)
        assert operations.by_ids(Cancel(), names, who="somebody") == wanted
        for name, outcome in wanted.items():
            if outcome is Outcome.CANCELLED:
                for known in (self.rows, self.waits, self.leased, self.failed):
                    known.pop(name, None)

    @rule(limit=st.sampled_from([1, 2, 500]))
    def a_dispatcher_is_killed_after_its_claim(self, limit):
        """Whether it had sent something is all the same: the store cannot know."""
        wanted = claim.ClaimRequest(deliver_conn_id="broker", due_by=self.now, limit=limit)
        until = self.now + timedelta(seconds=30)
        due = {name for name, one in self._due(0).items()} | self._late(0)
        with self.engine.begin() as connection:
            rows = claim.claim_due(connection, self.tables, wanted, now=self.now, dispatcher="dead", until=until)
        taken = [row["Id"] for row in rows]
        oldest = sorted(self.rows[name][0].due_at for name in due)[:limit]
        assert [row["Time"] for row in rows] == oldest
        assert set(taken) <= due
        self.leased.update(dict.fromkeys(taken, until))

    @rule(
        lookahead=MINUTES,
        horizon=st.sampled_from([0, 10, 60]),
        batch_size=st.sampled_from([1, 2, 500]),
        gone=st.booleans(),
        refused=st.sets(NAMES, max_size=10),
    )
    def dispatch(self, lookahead, horizon, batch_size, gone, refused):
        transport = Transport(minutes(horizon), missing={"gone"} if gone else set(), refused=refused)
        window = min(lookahead, horizon)
        due, late = self._due(window), self._late(window)
        for name in due.keys() | late:
            self.leased.pop(name, None)
        hopeless = {name for name, one in due.items() if gone and one.destination == "gone" and name not in refused}
        bad = {name for name in due if name in refused and not (gone and due[name].destination == "gone")}
        both = {name for name in due if name in refused and gone and due[name].destination == "gone"}
        hopeless |= both
        given_up = hopeless | {name for name in bad if self.rows[name][2] >= RETRIES}
        report, failed = self._run(transport, lookahead, batch_size)
        assert sorted(transport.ids) == sorted(due.keys() - bad - hopeless)
        assert all(transport.sent[n] == due[transport.ids[n]] for n in range(len(transport.sent)))
        end = self.now + minutes(lookahead)
        assert report.left_to_others == sum(
            conn == "other" and one.due_at <= end for one, conn, _ in self.rows.values()
        )
        assert (report.dispatched, report.expired) == (len(transport.sent), len(late))
        assert failed == given_up
        assert (report.retried, report.failed) == (len(bad - given_up), len(given_up))
        for name in transport.ids:
            self._leaves(name)
            self.dispatched.add(name)
        for name in late:
            self.failed[name] = ("expired", self.rows[name][2])
            self._leaves(name)
        for name in given_up:
            self.failed[name] = ("failed", self.rows[name][2] + 1)
            self._leaves(name)
        for name in bad - given_up:
            one, conn, failures = self.rows[name]
            self.rows[name] = (one, conn, failures + 1)
            self.waits[name] = self._next_try(name)
            longest = timedelta(seconds=2**failures)
            assert longest / 2 <= self.waits[name] - self.now <= longest

    @rule(lost_after=st.integers(0, 3), counts=st.booleans(), batch_size=st.sampled_from([1, 2, 500]))
    def lose_the_broker(self, lost_after, counts, batch_size):
        transport = Transport(lost_after=lost_after, counts_when_lost=counts)
        due = self._due(0)
        report, failed = self._run(transport, 0, batch_size)
        assert failed == set()
        assert set(transport.ids) <= due.keys()
        assert len(set(transport.ids)) == len(transport.ids)
        # removed is only what the transport had told to be confirmed
        left = {one.message_id for one in self._listed()}
        late = self._failed().keys() - self.failed.keys()
        gone = self.rows.keys() - left - late
        assert gone <= set(transport.ids)
        assert len(gone) == report.dispatched
        assert late <= self._late(0)
        for name in late:
            self.failed[name] = ("expired", self.rows[name][2])
            self._leaves(name)
        for name in gone:
            self._leaves(name)
            self.dispatched.add(name)
        # nobody holds what was not sent, but those whom nobody has taken from the dead
        self.leased = {name: until for name, until in self.leased.items() if until > self.now}

    @invariant()
    def holds_what_the_model_holds(self):
        listed = self._listed()
        wanted = sorted(self.rows.values(), key=lambda row: (row[0].due_at, row[0].message_id))
        assert [
            (one.message_id, one.destination, one.due_at, one.expires_at, one.deliver_conn_id, one.retry_count)
            for one in listed
        ] == [
            (one.message_id, one.destination, one.due_at, one.expires_at, conn, failures)
            for one, conn, failures in wanted
        ]
        assert self._failed() == self.failed
        past = self.tables.past
        with closing(self.engine.connect()) as connection:
            noted = {row.Id: row.ClaimedUntil for row in connection.execute(select(past.c.Id, past.c.ClaimedUntil))}
        assert noted.keys() - self.rows.keys() >= self.dispatched
        holding = {name for name, until in noted.items() if name in self.rows and until > self.now}
        assert holding == {name for name, until in self.leased.items() if until > self.now}

    def _listed(self) -> list:
        failed = self._failed()
        found = queries.messages(self.engine, self.tables, MessageFilter(), database_time=lambda connection: self.now)
        return [one for one in found if one.message_id not in failed]

    def _leaves(self, name) -> None:
        del self.rows[name]
        self.waits.pop(name, None)
        self.leased.pop(name, None)

    def _failed(self) -> dict:
        failed = self.tables.failed
        with closing(self.engine.connect()) as connection:
            found = connection.execute(select(failed.c.Id, failed.c.Reason, failed.c.RetryCount))
            return {row.Id: (row.Reason, row.RetryCount) for row in found}

    def _next_try(self, name) -> datetime:
        with closing(self.engine.connect()) as connection:
            return connection.execute(select(self.table.c.NextTry).where(self.table.c.Id == name)).scalar_one()

    def _free(self, name) -> bool:
        leased, wait = self.leased.get(name), self.waits.get(name)
        return (leased is None or leased <= self.now) and (wait is None or wait <= self.now)

    def _expired(self, one) -> bool:
        return one.expires_at is not None and one.expires_at <= self.now

    def _claimable(self, window: float) -> dict:
        end = self.now + minutes(window)
        return {
            name: one
            for name, (one, conn, _) in self.rows.items()
            if conn == "broker" and one.due_at <= end and self._free(name)
        }

    def _due(self, window: float) -> dict:
        return {name: one for name, one in self._claimable(window).items() if not self._expired(one)}

    def _late(self, window: float) -> set:
        return {name for name, one in self._claimable(window).items() if self._expired(one)}

    def _run(self, transport, lookahead, batch_size):
        def transports(conn_id, clock):
            transport.clock = clock
            return transport

        dispatcher = Dispatcher(
            self.engine,
            self.tables,
            conn_id="store",
            transports=transports,
            deliver_conn_ids=["broker"],
            lookahead=minutes(lookahead),
            batch_size=batch_size,
            number_of_retries=RETRIES,
            time_to_trigger_dispatch_circuit_breaker=timedelta(0),
            database_time=lambda connection: self.now,
        )
        try:
            return dispatcher.run(), set()
        except DispatchFailed as error:
            return error.report, set(error.failures)


StoreMachine.TestCase.settings = settings(stateful_step_count=20, suppress_health_check=[HealthCheck.too_slow])
TestStore = StoreMachine.TestCase
