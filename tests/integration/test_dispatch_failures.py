"""What a dispatcher does when something fails, and how long: pauses, breakers, the error destination, limits."""

from __future__ import annotations

import threading
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
from support.rabbitmq import eventually
from support.sleeping import Time
from support.standing import hold
from support.stores import Store, Transport, message

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.store.dispatch import claim
from airflow_delayed.store.dispatch.limits import Activity
from airflow_delayed.store.dispatch.report import BreakerTripped, DispatchFailed, record_heartbeat
from airflow_delayed.store.dispatch.repository import DispatchRepository
from airflow_delayed.store.dispatch.settle import BatchOutcome
from airflow_delayed.store.dispatch.turns import ClaimTurns
from airflow_delayed.store.engine import CarriedClock
from airflow_delayed.store.policy import DispatchPolicy

SECOND = timedelta(seconds=1)


def test_a_connection_that_comes_back_in_time_is_no_failure(store: Store, caplog):
    hook = store.installed()
    time = Time(hook)
    hook.send(message(f"m{n}", time.start - SECOND) for n in range(4))

    class Flaky(Transport):
        tries = 0

        def send(self, messages):
            self.tries += 1
            if self.tries <= 4:
                raise TransportUnavailable("connection 'broker': reset by peer")
            return super().send(messages)

    transport = Flaky()
    limit = {"time_to_trigger_dispatch_circuit_breaker": 30 * SECOND}
    assert store.dispatcher(hook, transport, **time.options(), **limit).run().dispatched == 4
    assert len(time.naps) == 4
    assert all(0.25 <= nap <= 5 for nap in time.naps)
    assert time.naps[3] > time.naps[0]
    # once when it begins, with its name once, and once when it is over
    assert [line for line in caplog.messages if "again" in line] == [
        "connection 'broker': reset by peer; it is tried again, and that it works again is logged",
        "connection 'broker' works again",
    ]
    assert sorted(transport.ids) == [f"m{n}" for n in range(4)]


def test_a_connection_that_stays_away_trips_its_breaker_and_holds_up_no_other(store: Store):
    hook = store.installed()
    time = Time(hook)
    for conn_id in ("good", "bad"):
        store.hook(conn_id).send(message(f"{conn_id}{n}", time.start - SECOND) for n in range(3))
    good = Transport()

    class Bad(Transport):
        """Its pauses are the only time that passes: none before the others are through."""

        def send(self, messages):
            eventually(lambda: len(good.ids) == 3)
            return super().send(messages)

    bad = Bad(lost_after=0)
    dispatcher = store.dispatcher(
        hook,
        good,
        **{**time.options(), "deliver_conn_ids": ["bad", "good", "undefined"]},
        transports=lambda conn_id, clock: {"good": good, "bad": bad}[conn_id],
        time_to_trigger_dispatch_circuit_breaker=30 * SECOND,
    )
    with pytest.raises(DispatchFailed) as caught:
        dispatcher.run("empty")
    assert sorted(good.ids) == ["good0", "good1", "good2"]
    assert caught.value.failures == {}
    reason = caught.value.unavailable["bad"]
    assert f"has failed since {time.start:%Y-%m-%d %H:%M}" in reason
    assert reason.endswith("(limit 30 s), last with: connection 'broker': reset by peer")
    assert caught.value.unavailable["undefined"] == "KeyError"
    assert 30 <= time.seconds < 31
    assert store.failures_of(hook) == {"bad0": 0, "bad1": 0, "bad2": 0}
    assert store.leased(hook) == set()


def test_what_its_broker_never_sees_does_not_make_a_connection_work(store: Store):
    """Messages that fail here, between losses of the connection, say nothing of it."""
    hook = store.installed()
    time = Time(hook)
    hook.send([message("a", time.start)])
    transport = Transport(lost_after=0)

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        if len(time.naps) < 30:
            # as many as may go in one send, so that they go alone
            names = [f"long{len(time.naps)}-{n}" for n in range(10)]
            transport.too_long.update(names)
            hook.send(message(name, time.start - SECOND) for name in names)

    dispatcher = store.dispatcher(
        hook,
        transport,
        **{**time.options(), "sleep": sleep},
        batch_size=1,
        time_to_trigger_dispatch_circuit_breaker=30 * SECOND,
    )
    with pytest.raises(DispatchFailed, match="connection 'broker' is not available"):
        dispatcher.run()
    assert 30 <= time.seconds < 31
    assert len(store.given_up(hook)) >= 20
    assert store.failures_of(hook)["a"] == 0


def test_a_breaker_of_the_database_that_another_connection_finds_working_does_not_trip(store: Store):
    hook = store.installed()
    time = Time(hook)
    hook.send(message(f"m{n}", time.start) for n in range(5))
    limits = DispatchPolicy(
        time_to_trigger_store_circuit_breaker=5 * SECOND, time_to_trigger_fetch_circuit_breaker=5 * SECOND
    )
    turns = ClaimTurns.of_connection("broker", SECOND)

    def other(seconds: float) -> None:
        """Another connection's work, while this one waits."""
        nonlocal turns
        time.seconds += 6
        batches[0].outcome = BatchOutcome(delivered=list(batches[0].rows))
        batches[:], turns = repository.settle_and_claim(batches, turns, 1)

    repository = DispatchRepository(
        hook.engine,
        hook.tables,
        conn_id="store",
        dispatcher="me",
        policy=limits,
        clock=CarriedClock(lambda: time.seconds),
        stop=threading.Event(),
        **{**time.options(), "sleep": other},
    )
    batches, turns = repository.settle_and_claim([], turns, 1)
    for work in (partial(repository.writing, Activity.SETTLE), repository.reading):
        failures = iter([True, True, False])

        def fails(connection, now, failures=failures) -> str:
            if next(failures):
                raise TransportUnavailable("gone")
            return "done"

        assert work(fails) == "done"
    repository.close()


def test_a_database_that_cannot_be_read_trips_the_breaker_of_claiming(store: Store):
    hook = store.installed()
    time = Time(hook)
    hook.send([message("a", time.start - SECOND)])
    store.sql(hook, 'ALTER TABLE {s}"delayed_messages" RENAME COLUMN "NextTry" TO "Other"')
    options = {**time.options(), "time_to_trigger_fetch_circuit_breaker": 10 * SECOND}
    with pytest.raises(
        BreakerTripped, match=r"claiming messages has failed since .* \(limit 10 s\), last with: .*NextTry"
    ):
        store.dispatcher(hook, Transport(), **options).run()
    assert 10 <= time.seconds < 11
    store.sql(hook, 'ALTER TABLE {s}"delayed_messages" RENAME COLUMN "Other" TO "NextTry"')
    assert store.dispatcher(hook, Transport()).run().dispatched == 1


def test_what_is_given_up_goes_to_the_error_destination_through_its_own_connection(store: Store):
    hook, transport = store.installed(), Transport(missing={"gone"})
    due = hook.now() + 60 * SECOND
    hook.send([message("a", due, destination="gone", headers={"x": "1"}, expires_at=due + SECOND), message("b", due)])
    report = store.dispatcher(hook, transport, lookahead=120 * SECOND, error_destination="errors").run()
    assert (report.dispatched, report.error_destination, report.failed) == (1, 1, 0)
    (copy,) = [one for one in transport.sent if one.message_id == "a"]
    assert (copy.destination, copy.body, copy.expires_at) == ("errors", b"body of a", None)
    assert copy.due_at <= hook.now()  # without delay
    assert copy.headers["x"] == "1"
    assert copy.headers["NServiceBus.FailedQ"] == "gone"
    assert copy.headers["NServiceBus.ExceptionInfo.Message"] == "connection 'broker' has no destination gone; make it"
    assert store.past(hook) == {"a": "dead-lettered", "b": "dispatched"}


def test_what_is_given_up_when_the_connection_is_lost_goes_to_the_error_destination_later(store: Store):
    hook = store.installed()
    now = hook.now()
    hook.send([message("a", now - 2 * SECOND, destination="gone"), message("b", now - SECOND), message("c", now)])
    with pytest.raises(DispatchFailed) as caught:
        store.dispatcher(hook, Transport(missing={"gone"}, lost_after=1), error_destination="errors").run()
    assert (caught.value.failures, list(caught.value.unavailable)) == ({}, ["broker"])
    assert store.given_up(hook) == {}
    assert store.failures_of(hook) == {"a": 0, "b": 0, "c": 0}
    report = store.dispatcher(hook, Transport(missing={"gone"}), error_destination="errors").run()
    assert (report.dispatched, report.error_destination, report.failed) == (2, 1, 0)


def test_an_error_destination_that_fails_too_trips_its_breaker_and_loses_nothing(store: Store):
    hook, transport = store.installed(), Transport(missing={"gone", "errors"})
    names = {f"m{n}" for n in range(40)}
    hook.send(message(name, hook.now(), destination="gone") for name in names)
    with pytest.raises(BreakerTripped, match=r"sending to the error destination, has failed more often than 1 times"):
        store.dispatcher(hook, transport, error_destination="errors").run()
    given_up = store.given_up(hook)
    assert set(given_up) == names
    assert given_up["m0"][2].endswith(
        "has no destination gone; make it; error destination 'errors': connection 'broker' has no destination errors;"
        " make it"
    )
    assert store.leased(hook) == set()


def test_a_rate_is_kept(store: Store):
    hook, transport = store.installed(), Transport()
    time = Time(hook)
    hook.send(message(f"m{n}", time.start - SECOND) for n in range(100))
    report = store.dispatcher(hook, transport, **time.options(), max_rate=20, batch_size=30).run()
    assert report.dispatched == 100
    # a second's worth at once, and then 20 a second
    assert 4 <= time.seconds <= 4.5


@pytest.mark.mariadb
def test_old_ids_are_forgotten_and_those_that_are_leased_are_not(store: Store):
    hook, transport = store.installed(), Transport()
    time = Time(hook)
    hook.send(message(f"m{n}", time.start - SECOND) for n in range(1500))
    store.dispatcher(hook, transport, **time.options()).run()
    assert len(store.past(hook)) == 1500
    time.seconds = 14 * 86_400 - 1
    assert store.dispatcher(hook, transport, **time.options()).run().forgotten == 0
    time.seconds = 14 * 86_400 + 1
    assert store.dispatcher(hook, transport, **time.options(), remember=timedelta(days=15)).run().forgotten == 0
    assert store.dispatcher(hook, transport, **time.options()).run().forgotten == 1500
    assert store.past(hook) == {}


@pytest.mark.mariadb
@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_a_pass_forgets_as_many_ids_as_it_dispatches_and_more(store: Store):
    """Ten million messages a night would else leave more ids each night than are forgotten."""
    hook, transport = store.installed(), Transport()
    time = Time(hook)
    long_ago = time.start - timedelta(days=15)
    rows = [{"Id": f"old{n}", "Outcome": "dispatched", "At": long_ago} for n in range(105_000)]
    with hook.engine.begin() as connection:
        hook.dialect.insert_all(connection, hook.tables.past, rows)
    hook.send(message(f"m{n}", time.start - SECOND) for n in range(3000))
    report = store.dispatcher(hook, transport, **time.options()).run()
    # 100,000 whatever it dispatches
    assert (report.dispatched, report.forgotten) == (3000, 103_000)


def test_it_stays_for_a_time(store: Store):
    hook, transport = store.installed(), Transport()
    time = Time(hook)
    hook.send(message(f"m{n}", time.start + n * 20 * SECOND) for n in range(5))
    report = store.dispatcher(hook, transport, **time.options()).run(45 * SECOND)
    assert transport.ids == ["m0", "m1", "m2"]
    assert report.dispatched == 3
    assert 45 <= time.seconds < 45.1


def test_one_pass_at_a_time_for_who_sleeps_elsewhere(store: Store):
    hook, transport = store.installed(), Transport(refused={"b"})
    time = Time(hook)
    before = set(threading.enumerate())
    dispatcher = store.dispatcher(hook, transport, **time.options(), lookahead=10 * SECOND)
    assert dispatcher.once().dispatched == 0
    assert dispatcher.next_due() is None
    hook.send([message("a", time.start + 70 * SECOND)])
    assert dispatcher.next_due() == 60 * SECOND
    time.seconds = 60.0
    assert dispatcher.next_due() == timedelta(0) or dispatcher.next_due() == SECOND / 2
    assert dispatcher.once().dispatched == 1
    hook.send([message("b", time.start)])
    assert dispatcher.once().retried == 1
    assert SECOND / 2 <= dispatcher.next_due() <= SECOND
    dispatcher.check()
    assert dispatcher.report.dispatched == 1
    dispatcher.close()
    dispatcher.close()
    assert transport.closed >= 1
    # others that were there may have ended meanwhile
    assert set(threading.enumerate()) <= before


def test_it_leaves_a_trace_of_when_it_was_there(store: Store):
    hook = store.installed()
    time = Time(hook)
    assert (hook.last_seen(), store.hook(None).last_seen()) == (None, None)
    store.dispatcher(hook, Transport(), **time.options()).run()
    assert hook.last_seen() == time.start
    assert store.hook("other").last_seen() is None
    assert store.hook(None).last_seen() is None
    time.seconds = 3600.0
    store.dispatcher(hook, **time.options()).run()
    assert store.hook(None).last_seen() == time.start + 3600 * SECOND
    assert hook.last_seen() == time.start
    rows = store.sql(hook, 'SELECT "Id", "EndedAt" FROM {s}"delayed_messages_dispatchers"')
    assert len({row[0] for row in rows}) == 2
    assert all(row[1] is not None for row in rows)
    # those of the day before are forgotten
    time.seconds = 86_401.0
    with hook.engine.begin() as connection:
        record_heartbeat(connection, hook.tables, "third", ["x"], time.start + timedelta(seconds=time.seconds))
    assert hook.last_seen() is None


@pytest.mark.mariadb
def test_what_was_sent_is_written_down_though_no_more_can_be_claimed(store: Store):
    """Both are done in one transaction, as long as that can be."""
    hook = store.installed()
    hook.send(message(f"m{n}", hook.now() - SECOND + n * SECOND / 100) for n in range(3))

    class Broken(Transport):
        def send(self, messages):
            report = super().send(messages)
            if self.ids == ["m0"]:
                eventually(lambda: store.leased(hook) == {"m0", "m1"})
                store.sql(hook, 'ALTER TABLE {s}"delayed_messages" RENAME COLUMN "NextTry" TO "Other"')
            return report

    transport = Broken()
    dispatcher = store.dispatcher(store.hook(), transport, batch_size=1)
    with pytest.raises(BreakerTripped, match="claiming messages has failed since"):
        dispatcher.run()
    store.sql(hook, 'ALTER TABLE {s}"delayed_messages" RENAME COLUMN "Other" TO "NextTry"')
    assert store.past(hook) == dict.fromkeys(transport.ids, "dispatched")
    assert dispatcher.report.dispatched >= 1
    assert [one.message_id for one in hook.list()] == [name for name in ("m1", "m2") if name not in transport.ids]
    assert store.leased(hook) == set()


@pytest.mark.mariadb
def test_what_a_dead_dispatcher_leased_is_met_in_the_middle_of_the_backlog(store: Store):
    hook, transport = store.installed(), Transport()
    start = hook.now()
    hook.send(message(f"m{n}", start - 10 * SECOND + n * SECOND) for n in range(2, 4))
    assert hold(hook, "m2", "m3", lease=-SECOND, dispatcher="dead") == {"m2", "m3"}
    hook.send(message(f"m{n}", start - 10 * SECOND + n * SECOND) for n in (0, 1, 4, 5))
    # no time passes: it does not look again from the beginning
    report = store.dispatcher(hook, transport, batch_size=2, monotonic=lambda: 0.0).run()
    assert report.dispatched == 6
    assert transport.ids == [f"m{n}" for n in range(6)]
    assert hook.count() == 0


@pytest.mark.mariadb
@pytest.mark.parametrize("store", ["postgres", "mariadb"], indirect=True)
def test_a_claim_locks_its_own_messages_alone(store: Store):
    """A large backlog of one connection, whose broker is away, holds up no other dispatcher."""
    hook = store.installed()
    due = hook.now() - SECOND
    hook.send(message(f"m{n}", due) for n in range(50))
    store.hook("second").send([message("s", due)])
    transport = Transport()
    with hook.engine.begin() as connection:
        wanted = claim.ClaimRequest(deliver_conn_id="second", due_by=hook.now(), limit=10)
        locked = claim.lock_due(connection, hook.tables, wanted, hook.now())
        assert store.dispatcher(hook, transport).run().dispatched == 50
    assert [row["Id"] for row in locked] == ["s"]


@pytest.mark.mariadb
@pytest.mark.parametrize("store", ["mariadb"], indirect=True)
def test_what_another_transaction_locks_for_a_moment_is_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch):
    hook = store.installed()
    start = hook.now()
    hook.send([message("m", start - SECOND)])
    pauses: list[float] = []
    with hook.engine.connect() as other, hook.engine.connect() as connection:
        other.execute(hook.tables.messages.select().with_for_update()).all()

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if sum(pauses) > 1:
                other.rollback()

        monkeypatch.setattr(claim, "time", SimpleNamespace(sleep=sleep))
        wanted = claim.ClaimRequest(deliver_conn_id="broker", due_by=start, limit=2)
        claimed = claim.claim_due(connection, hook.tables, wanted, now=start, dispatcher="d", until=start + SECOND)
    assert [row["Id"] for row in claimed] == ["m"]
