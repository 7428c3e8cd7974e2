"""Any order of claims, failures, changes and time: the operations do what a dictionary would."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import Connection, delete, insert, select, update
from support.lengths import length
from support.standing import lock, record
from support.stores import message
from support.table_pools import store_file

from airflow_delayed.message import DelayedMessage
from airflow_delayed.store import counts, queries
from airflow_delayed.store.api import DISPATCHED
from airflow_delayed.store.bulk_changes import BulkChanges
from airflow_delayed.store.changes import Cancel, Erase, Reschedule, Restore, Retry
from airflow_delayed.store.filters import MessageFilter, MessageState, states_of
from airflow_delayed.store.records import count_rows, insert_new_rows, remove_rows, to_row

pytestmark = pytest.mark.mariadb

START = datetime(2030, 1, 1, tzinfo=timezone.utc)
NAMES = [*(f"m{n}" for n in range(9)), "M0"]
SETS = st.sets(st.sampled_from(NAMES), min_size=1, max_size=3)
#: Which of those that can be: a number is taken modulo how many there are, so that no step is for nothing.
PICKS = st.sets(st.integers(0, len(NAMES) - 1), min_size=1, max_size=3)
TAGS = st.sampled_from(["t", "T", None])
MINUTES = st.integers(0, 30)
LEASE = timedelta(minutes=3)
#: How long a cancel can be taken back.
GRACE = timedelta(minutes=8)
STEPS = length("steps of each example of the operations", 20, 30)
#: When it is due, in minutes from ten minutes ago; how long it lives from then on; its tag.
FIELDS = st.tuples(MINUTES, st.sampled_from([None, None, 5, 40]), TAGS)


def minutes(count: float) -> timedelta:
    return timedelta(minutes=count)


def picked(names: list[str], picks: set[int]) -> list[str]:
    return sorted({names[number % len(names)] for number in picks})


@dataclass(frozen=True)
class Kept:
    """What the model knows of a message that is in the store."""

    message: DelayedMessage
    due_at: datetime
    claimed_until: datetime | None = None
    next_try: datetime | None = None
    failures: int = 0
    #: "failed" or "expired", since when.
    over: tuple[str, datetime] | None = None

    def leased(self, now: datetime) -> bool:
        return self.claimed_until is not None and self.claimed_until > now

    def state(self, now: datetime) -> str:
        if self.over:
            return self.over[0]
        if self.leased(now):
            return "in flight"
        if self.message.expires_at and self.message.expires_at <= now:
            return "expired"
        if self.next_try and self.next_try > now:
            return "retrying"
        return "due" if self.due_at <= now else "waiting"


class OperationsMachine(RuleBasedStateMachine):
    """The model: ``kept`` is in the store, ``past`` is remembered, ``cancelled`` can be restored until then."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.engine, self.tables = store_file(Path(self.folder.name) / "model.db")
        self.now = START
        self.kept: dict[str, Kept] = {}
        self.past: dict[str, tuple[str, datetime]] = {}
        self.cancelled: dict[str, tuple[Kept, datetime]] = {}
        self.audited = 0
        # nobody else is at work, so waiting for those in flight sees no change; it costs no time either
        ticks = iter(range(10**9))
        self.operations = BulkChanges(
            self.engine,
            self.tables,
            database_time=self.time,
            sleep=lambda seconds: None,
            monotonic=lambda: next(ticks) / 5,
        )

    def time(self, connection: object) -> datetime:
        return self.now

    def teardown(self) -> None:
        self.engine.dispose()
        self.folder.cleanup()

    # what others do

    @initialize(fields=st.lists(FIELDS, min_size=len(NAMES), max_size=len(NAMES)))
    def filled(self, fields):
        self._store(dict(zip(NAMES, fields, strict=True)))

    @precondition(lambda self: self._new())
    @rule(picks=PICKS, fields=FIELDS)
    def store(self, picks, fields):
        self._store(dict.fromkeys(picked(self._new(), picks), fields))

    @precondition(lambda self: self._free())
    @rule(picks=PICKS, dispatcher=st.sampled_from(["one", "two"]))
    def claim(self, picks, dispatcher):
        names, until = picked(self._free(), picks), self.now + LEASE
        with self.engine.begin() as connection:
            rows = lock(connection, self.tables, *names)
            record(connection, self.tables, rows, DISPATCHED, self.now, Dispatcher=dispatcher, ClaimedUntil=until)
        for name in names:
            self.kept[name] = replace(self.kept[name], claimed_until=until)

    @precondition(lambda self: self._leased())
    @rule(picks=PICKS)
    def dispatch(self, picks):
        names = picked(self._leased(), picks)
        with self.engine.begin() as connection:
            remove_rows(connection, self.tables.messages, names)
        for name in names:
            self.past[name] = ("dispatched", self.kept.pop(name).claimed_until - LEASE)

    @precondition(lambda self: self._leased())
    @rule(picks=PICKS, pause=MINUTES)
    def fail(self, picks, pause):
        names, next_try = picked(self._leased(), picks), self.now + minutes(pause)
        with self.engine.begin() as connection:
            failure = update(self.tables.messages).where(self.tables.messages.c.Id.in_(names))
            connection.execute(failure.values(RetryCount=1, NextTry=next_try))
            self._release(connection, *names)
        for name in names:
            self.kept[name] = replace(self.kept[name], claimed_until=None, next_try=next_try, failures=1)

    @precondition(lambda self: self._waiting())
    @rule(picks=PICKS)
    def give_up(self, picks):
        table = self.tables.messages
        with self.engine.begin() as connection:
            for name in picked(self._waiting(), picks):
                one = self.kept[name]
                expired = one.message.expires_at is not None and one.message.expires_at <= self.now
                reason = "expired" if expired else "failed"
                row = connection.execute(select(table).where(table.c.Id == name)).mappings().one()
                extra = {"Reason": reason, "FailedAt": self.now, "RetryCount": 3}
                connection.execute(insert(self.tables.failed), [{**row, **extra}])
                remove_rows(connection, table, [name])
                self._release(connection, name)
                self.kept[name] = replace(one, claimed_until=None, failures=3, over=(reason, self.now))

    def _release(self, connection: Connection, *names: str) -> None:
        connection.execute(delete(self.tables.past).where(self.tables.past.c.Id.in_(names)))

    def _store(self, fields: dict[str, tuple]) -> None:
        made = []
        for name in sorted(fields):
            due, lives, tag = fields[name]
            due_at = self.now + minutes(due - 10)
            expires = None if lives is None else due_at + minutes(lives)
            made.append(message(name, due_at, tag=tag, expires_at=expires))
        with self.engine.begin() as connection:
            rows = [{**to_row(one, "broker"), "StoredAt": self.now} for one in made]
            insert_new_rows(connection, self.tables.messages, rows)
        self.kept.update((one.message_id, Kept(one, one.due_at)) for one in made)

    def _new(self) -> list[str]:
        return [name for name in NAMES if name not in self.kept and name not in self.past]

    def _free(self) -> list[str]:
        return sorted(name for name, one in self.kept.items() if one.state(self.now) in ("due", "waiting"))

    def _leased(self) -> list[str]:
        return sorted(name for name, one in self.kept.items() if not one.over and one.leased(self.now))

    def _waiting(self) -> list[str]:
        return sorted(name for name, one in self.kept.items() if not one.over)

    @rule(passed=st.integers(1, 6))
    def time_passes(self, passed):
        self.now += minutes(passed)
        # as a dispatcher does
        with self.engine.begin() as connection:
            connection.execute(delete(self.tables.cancelled).where(self.tables.cancelled.c.Until <= self.now))
        self.cancelled = {name: (one, until) for name, (one, until) in self.cancelled.items() if until > self.now}

    # what is tested

    @rule(ids=SETS | TAGS, dry_run=st.booleans())
    def cancel(self, ids, dry_run):
        def one(name):
            if name in self.kept:
                if not dry_run:
                    self.cancelled[name] = (replace(self.kept[name], claimed_until=None), self.now + GRACE)
                self._done(name, "cancelled", dry_run)
                return "cancelled"
            return self._gone(name)

        self._change(Cancel(GRACE), ids, one, dry_run)

    @rule(ids=SETS | TAGS, dry_run=st.booleans(), overdue_ok=st.booleans())
    def restore(self, ids, dry_run, overdue_ok):
        def one(name):
            if name in self.kept:
                return "already stored"
            if name not in self.cancelled:
                return self._gone(name)
            back, _ = self.cancelled[name]
            if not back.over and back.message.expires_at is not None and back.message.expires_at <= self.now:
                return "expired"
            if not back.over and back.due_at <= self.now and not overdue_ok:
                return "overdue"
            if not dry_run:
                self.kept[name], _ = self.cancelled.pop(name)
                del self.past[name]
            return "restored"

        self._change(Restore(overdue_ok), ids, one, dry_run, lambda kept: False, cancelled_too=True)

    @rule(ids=SETS | TAGS, dry_run=st.booleans())
    def erase(self, ids, dry_run):
        def one(name):
            if name in self.kept or self.past.get(name, ("",))[0] in ("cancelled", "purged"):
                if not dry_run:
                    self.cancelled.pop(name, None)
                self._done(name, "erased", dry_run)
                return "erased"
            gone = self._gone(name)
            if gone == "dispatched":
                self._done(name, "erased", dry_run)
            return gone

        self._change(Erase(), ids, one, dry_run, cancelled_too=True)

    @rule(ids=SETS | TAGS, due=MINUTES, dry_run=st.booleans())
    def reschedule(self, ids, due, dry_run):
        due_at = self.now + minutes(due - 10)

        def one(name):
            kept = self.kept.get(name)
            if kept is None:
                return self._gone(name)
            if kept.over:
                return kept.over[0]
            expires = kept.message.expires_at
            if expires is not None and expires <= self.now:
                return "expired"
            if expires is not None and expires <= due_at:
                return "expires first"
            if kept.due_at == due_at:
                return "unchanged"
            if not dry_run:
                self.kept[name] = replace(kept, due_at=due_at, next_try=None, claimed_until=None)
            return "rescheduled"

        def met(kept):
            return not kept.over and kept.due_at != due_at

        self._change(Reschedule(due_at), ids, one, dry_run, met)

    @rule(ids=SETS | TAGS, dry_run=st.booleans())
    def retry(self, ids, dry_run):
        def one(name):
            kept = self.kept.get(name)
            if kept is None:
                return self._gone(name)
            if not kept.over:
                return "unchanged"
            if kept.message.expires_at is not None and kept.message.expires_at <= self.now:
                return "expired"
            if not dry_run:
                self.kept[name] = replace(kept, over=None, next_try=None, failures=0)
            return "retried"

        self._change(Retry(), ids, one, dry_run, lambda kept: kept.over)

    @rule(age=st.integers(0, 20), reasons=st.sets(st.sampled_from(["failed", "expired", "remembered"]), min_size=1))
    def purge(self, age, reasons):
        before = self.now - minutes(age)
        leased = self._leased()
        forgotten = set()
        if "remembered" in reasons:
            # within its lease, what was dispatched is still needed
            forgotten = {
                name
                for name, (outcome, at) in self.past.items()
                if at < before and not (outcome == "dispatched" and at + LEASE > self.now)
            }
        abandoned = {
            name
            for name, one in self.kept.items()
            if one.claimed_until and name not in leased and one.claimed_until - LEASE < before
        }
        purged = {
            name for name, one in self.kept.items() if one.over and one.over[0] in reasons and one.over[1] < before
        }
        found = self.operations.purge(minutes(age), sorted(reasons), who="me")
        self.audited += 1
        many = len(forgotten) + (len(abandoned) if "remembered" in reasons else 0)
        assert found == dict.fromkeys(purged, "purged")
        assert found.counts.get("forgotten", 0) == many
        for name in forgotten:
            del self.past[name]
            self.cancelled.pop(name, None)
        for name in abandoned if "remembered" in reasons else ():
            self.kept[name] = replace(self.kept[name], claimed_until=None)
        for name in purged:
            del self.kept[name]
            self.past[name] = ("purged", self.now)

    @rule(
        tag=TAGS,
        states=st.none() | st.sets(st.sampled_from([one.value for one in MessageState])),
        since=st.none() | MINUTES,
        limit=st.integers(1, 4),
    )
    def look(self, tag, states, since, limit):
        due_from = None if since is None else START + minutes(since)
        criteria = MessageFilter(
            tag=tag, states=states_of(None if states is None else sorted(states)), due_from=due_from
        )
        wanted = sorted(
            (one.due_at, name)
            for name, one in self.kept.items()
            if (tag is None or one.message.tag == tag)
            and (states is None or one.state(self.now) in states)
            and (due_from is None or one.due_at >= due_from)
        )
        found, after = [], None
        while page := list(
            queries.messages(self.engine, self.tables, criteria, limit=limit, after=after, database_time=self.time)
        ):
            found += page
            after = page[-1].token
        assert [(one.due_at, one.message_id) for one in found] == wanted

    @invariant()
    def stands_as_the_model_says(self):
        found = queries.messages(self.engine, self.tables, MessageFilter(), database_time=self.time)
        states = {one.message_id: (one.state.value, one.due_at, one.retry_count) for one in found}
        assert states == {name: (one.state(self.now), one.due_at, one.failures) for name, one in self.kept.items()}
        with self.engine.connect() as connection:
            table = self.tables.past
            rows = connection.execute(select(table)).all()
            audited = count_rows(connection, self.tables.audit)
            restorable = {row.Id: row.Until for row in connection.execute(select(self.tables.cancelled))}
        assert {row.Id: (row.Outcome, row.At) for row in rows if row.Id not in self.kept} == self.past
        assert all(row.Digest is None and row.Destination is None for row in rows if row.Outcome == "erased")
        assert restorable == {name: until for name, (_, until) in self.cancelled.items()}
        assert audited == self.audited
        self._counted(states)

    def _counted(self, messages: dict[str, tuple[str, datetime, int]]) -> None:
        with self.engine.connect() as connection:
            found = counts.count(
                connection,
                self.tables,
                MessageFilter(),
                self.now,
                overdue=minutes(5),
                hours=3,
                minutes=0,
                by_destination=True,
            )
        states = [state for state, _, _ in messages.values()]
        names = ("waiting", "due", "in flight", "retrying", "failed", "expired")
        numbers = found.numbers()
        assert {name: numbers[name.replace(" ", "_")] for name in names} == {name: states.count(name) for name in names}
        not_received = ("due", "in flight", "retrying")
        late = [due for state, due, _ in messages.values() if state in not_received and due <= self.now - minutes(5)]
        assert found.overdue == len(late)
        assert found.by_destination == ({"q": len(messages)} if messages else {})
        ahead = [due for name, (_, due, _) in messages.items() if due > self.now and not self.kept[name].over]
        assert sum(found.by_hour.values()) == len(ahead)
        assert found.next_due == min(ahead, default=None)

    def _gone(self, name: str) -> str:
        outcome = self.past[name][0] if name in self.past else "absent"
        return {"cancelled": "already cancelled", "purged": "already removed", "erased": "already removed"}.get(
            outcome, outcome
        )

    def _done(self, name: str, outcome: str, dry_run: bool) -> None:
        if not dry_run:
            self.kept.pop(name, None)
            self.past[name] = (outcome, self.now)

    def _change(self, change, ids, one, dry_run, met=lambda kept: True, *, cancelled_too=False) -> None:
        """Do it by ids, or by a tag (None: by all that is due)."""
        if isinstance(ids, set):
            names = sorted(ids)
            found = self.operations.by_ids(change, names, who="me", dry_run=dry_run)
            assert list(found) == names
            self.audited += bool(names) and not dry_run
        else:
            criteria = MessageFilter(tag=ids) if ids else MessageFilter(due_until=self.now)
            there = {name: kept for name, kept in self.kept.items() if met(kept)}
            if cancelled_too:
                there.update((name, kept) for name, (kept, _) in self.cancelled.items())
            names = [
                name for name, kept in there.items() if (kept.message.tag == ids if ids else kept.due_at < self.now)
            ]
            found = self.operations.by_filter(change, criteria, who="me", dry_run=dry_run)
            self.audited += not dry_run
        leased = set(self._leased()).intersection(names)
        wanted = {name: "in flight" if name in leased else one(name) for name in names}
        assert found == wanted
        assert {outcome.value: many for outcome, many in found.counts.items()} == {
            outcome: list(wanted.values()).count(outcome) for outcome in wanted.values()
        }


OperationsMachine.TestCase.settings = settings(stateful_step_count=STEPS, suppress_health_check=[HealthCheck.too_slow])
TestOperations = OperationsMachine.TestCase
