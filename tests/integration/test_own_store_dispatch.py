"""Dispatching from a store of one's own, with the faults of store and transport."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.own_store import FileStore
from support.rabbitmq import VirtualHost
from support.stores import Transport, message

from airflow_delayed.errors import DelayedError
from airflow_delayed.message import utcnow
from airflow_delayed.operators.custom_dispatch import CustomStoreDispatchOperator
from airflow_delayed.store.dispatch.custom import CustomDispatcher
from airflow_delayed.store.dispatch.report import BreakerTripped, DispatchFailed
from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.store.protocol import UnsupportedConsistency

SECOND = timedelta(seconds=1)


class Room:
    """A store in a file, a transport, and a clock that sleeping moves on."""

    def __init__(self, path: str, kind: type[FileStore] = FileStore) -> None:
        self.start = self.now = utcnow()
        self.path = path
        self.kind = kind
        self.transport = Transport(clock=lambda: self.now)
        self.slept: list[float] = []
        self.store = self.other()
        self.store.set_up_infrastructure()

    def other(self) -> FileStore:
        return self.kind(self.path, clock=lambda: self.now)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds * SECOND

    def dispatcher(self, transport: Transport | None = None, **policy) -> CustomDispatcher:
        return CustomDispatcher(
            self.store,
            name="room",
            transport=transport or self.transport,
            conn_id="broker",
            policy=DispatchPolicy(**{"lookahead": timedelta(0), **policy}),
            clock=lambda: self.now,
            monotonic=lambda: (self.now - self.start).total_seconds(),
            sleep=self.sleep,
        )

    def run(self, until=None, transport: Transport | None = None, **policy):
        return self.dispatcher(transport, **policy).run(until)

    @property
    def left(self) -> dict[str, int]:
        """Failures by id."""
        return dict(self.store._run("SELECT id, failures FROM messages ORDER BY id"))


@pytest.fixture
def room(tmp_path) -> Room:
    return Room(str(tmp_path / "own.db"))


class OneByOne(FileStore):
    """Offers what it must, and no more."""

    fetch_batch = None

    def fetch_next_due(self, at):
        return next(iter(FileStore.fetch_batch(self, at, 1)), None)


@pytest.mark.parametrize("kind", [FileStore, OneByOne])
def test_what_is_due_is_dispatched_in_order(tmp_path, kind):
    room = Room(str(tmp_path / "own.db"), kind)
    dues = {"late": -5, "soon": 60, "c": 0, "far": 901}
    for name, due in dues.items():
        room.store.store(message(name, room.now + due * SECOND))
    report = room.run(lookahead=900 * SECOND)
    assert room.transport.ids == ["late", "c", "soon"]
    assert (report.dispatched, report.by_connection) == (3, {"broker": 3})
    assert room.transport.delays["soon"] == 60 * SECOND
    assert room.left == {"far": 0}
    assert room.transport.closed == 1


def test_no_earlier_than_the_transport_can_delay(room):
    room.transport.horizon = 10 * SECOND
    for due in (9, 11):
        room.store.store(message(f"m{due}", room.now + due * SECOND))
    room.run(lookahead=900 * SECOND)
    assert room.transport.ids == ["m9"]


def test_until_empty_it_sleeps_until_the_next_is_due(room):
    for due in (0, 30, 200):
        room.store.store(message(f"m{due}", room.now + due * SECOND))
    assert room.run("empty").dispatched == 3
    assert room.slept == [30, 60, 60, 50]
    assert set(room.transport.delays.values()) == {timedelta(0)}


def test_a_message_that_fails_holds_up_no_other_and_is_given_up(room):
    for name in ("bad", "good"):
        room.store.store(message(name, room.now, headers={"a": "b"}))
    room.transport.refused = {"bad"}
    for count in (1, 2):
        report = room.run(number_of_retries=2, error_destination="errors")
        assert (report.retried, report.error_destination) == (1, 0)
        assert room.left == {"bad": count}
    assert room.transport.ids == ["good"]

    class TakesCopies(Transport):
        def send(self, messages):
            return super().send([self.seen(one) for one in messages])

        def seen(self, one):
            self.refused = {"bad"} if one.destination == "q" else set()
            return one

    copies = TakesCopies(clock=lambda: room.now)
    report = room.run(number_of_retries=2, error_destination="errors", transport=copies)
    assert (report.retried, report.error_destination, report.failed) == (0, 1, 0)
    assert room.left == {}
    (copy,) = copies.sent
    assert (copy.destination, copy.message_id, copy.body) == ("errors", "bad", b"body of bad")
    assert copy.headers["a"] == "b"
    assert copy.headers["NServiceBus.FailedQ"] == "q"
    assert copy.headers["NServiceBus.ExceptionInfo.Message"] == "refused"


def test_until_empty_a_message_that_fails_is_tried_again_in_growing_pauses(room):
    room.store.store(message("bad", room.now))
    room.transport.refused = {"bad"}
    with pytest.raises(DispatchFailed, match=r"message bad: refused.*still in the store.*an error_destination"):
        room.run("empty", number_of_retries=3)
    assert room.left == {"bad": 4}
    assert len(room.slept) == 3
    assert max(room.slept) <= 5


def test_a_destination_that_does_not_exist_goes_to_the_error_destination_at_once(room):
    room.store.store(message("a", room.now, destination="gone"))
    room.store.store(message("b", room.now))
    room.transport.missing = {"gone"}
    assert room.run(error_destination="errors").error_destination == 1
    assert [(one.message_id, one.destination) for one in room.transport.sent] == [("b", "q"), ("a", "errors")]
    assert room.left == {}


def test_an_error_destination_that_does_not_exist_keeps_the_message(room):
    for n in range(31):
        room.store.store(message(f"m{n:02}", room.now, destination="gone"))
    room.transport.missing = {"gone", "errors"}
    with pytest.raises(BreakerTripped, match="giving up messages has failed more often than 1 times a second"):
        room.run(error_destination="errors")
    assert len(room.left) == 31
    room.now += 31 * SECOND
    with pytest.raises(DispatchFailed, match=r"31 failed.*error destination 'errors'"):
        room.run(error_destination="errors", maximum_recovery_failures_per_second=2)
    assert len(room.left) == 31


def test_what_expired_is_not_dispatched(room, caplog):
    room.store.store(message("old", room.now - 9 * SECOND, expires_at=room.now))
    room.store.store(message("new", room.now - 9 * SECOND, expires_at=room.now + SECOND))
    report = room.run()
    assert (room.transport.ids, report.expired, room.left) == (["new"], 1, {})
    assert "message old expired" in caplog.text


@pytest.mark.parametrize("counts", [True, False])
def test_a_connection_that_comes_back_costs_no_retry(room, counts):
    for n in range(10):
        room.store.store(message(f"m{n}", room.now + n * SECOND / 100))
    room.now += SECOND

    class Flaky(Transport):
        def send(self, messages):
            self.lost_after = 3 if len(room.slept) < 20 else None
            return super().send(messages)

    flaky = Flaky(clock=lambda: room.now, counts_when_lost=counts)
    assert room.run(transport=flaky, number_of_retries=0).dispatched == 10
    assert set(flaky.ids) == {f"m{n}" for n in range(10)}
    assert room.left == {}


def test_a_connection_that_does_not_come_back_ends_the_run(room):
    room.store.store(message("a", room.now))
    room.transport.lost_after = 0
    with pytest.raises(DispatchFailed, match=r"'broker': dispatching has failed since .* reset by peer") as caught:
        room.run(number_of_retries=0, error_destination="errors")
    assert list(caught.value.unavailable) == ["broker"]
    assert sum(room.slept) == pytest.approx(30)
    assert room.left == {"a": 0}
    # a short breaker trips at once; a long one outlasts the lease, and the message is fetched anew
    for limit in (0, 100):
        room.now += 31 * SECOND
        room.slept.clear()
        with pytest.raises(DispatchFailed, match="1 connections are not available"):
            room.run(time_to_trigger_dispatch_circuit_breaker=limit * SECOND)
        assert sum(room.slept) == pytest.approx(limit, abs=2)
    assert room.left == {"a": 0}


class Failing(FileStore):
    """Fails so often at one of its methods."""

    fault: tuple[str, int] = ("", 0)

    def fail(self, name: str) -> None:
        if self.fault[0] == name and self.fault[1] > 0:
            self.fault = name, self.fault[1] - 1
            raise OSError("secret: hush")

    def fetch_batch(self, at, limit):
        self.fail("fetch")
        return super().fetch_batch(at, limit)

    def remove(self, leased):
        self.fail("remove")
        return super().remove(leased)

    def increment_failure_count(self, leased):
        self.fail("count")
        return super().increment_failure_count(leased)

    def initialize(self, name, consistency):
        self.fail("initialize")
        super().initialize(name, consistency)

    def next_due(self):
        self.fail("next")
        return super().next_due()


@pytest.mark.parametrize("method", ["initialize", "fetch", "remove", "next"])
def test_a_store_that_comes_back(tmp_path, method, caplog):
    room = Room(str(tmp_path / "own.db"), Failing)
    room.store.store(message("a", room.now))
    room.store.fault = method, 20
    assert room.run("empty").dispatched == 1
    assert room.transport.ids == ["a"]
    assert room.left == {}
    assert "hush" not in caplog.text


@pytest.mark.parametrize(
    "method, text",
    [("initialize", "fetching"), ("fetch", "fetching"), ("remove", "writing"), ("next", "fetching")],
)
def test_a_store_that_does_not_come_back_ends_the_run(tmp_path, method, text):
    room = Room(str(tmp_path / "own.db"), Failing)
    room.store.store(message("a", room.now))
    room.store.fault = method, 99
    with pytest.raises(BreakerTripped, match=f"store 'room': {text} has failed since .*: OSError") as caught:
        room.run("empty")
    assert "hush" not in str(caught.value)
    assert sum(room.slept) == pytest.approx(30)
    assert room.transport.closed == 1


def test_a_failure_that_cannot_be_counted_is_tried_again_when_the_lease_ends(tmp_path):
    room = Room(str(tmp_path / "own.db"), Failing)
    room.store.store(message("bad", room.now))
    room.transport.refused = {"bad"}
    room.store.fault = "count", 1
    room.run()
    assert room.left == {"bad": 0}
    room.now += 31 * SECOND
    room.run()
    assert room.left == {"bad": 1}


def test_a_message_that_was_removed_meanwhile_is_told(tmp_path, caplog):
    class Gone(FileStore):
        def remove(self, leased):
            super().remove(leased)
            return super().remove(leased)

    room = Room(str(tmp_path / "own.db"), Gone)
    room.store.store(message("a", room.now))
    assert room.run().dispatched == 1
    assert "message a was removed meanwhile; it may have been sent twice" in caplog.text


def test_what_cannot_be_kept_is_refused(room):
    with pytest.raises(ValueError, match="max_rate= is not kept"):
        room.run(max_rate=1.0)

    class Strict(FileStore):
        def initialize(self, name, consistency):
            raise UnsupportedConsistency(f"{name} keeps nothing")

    room.store = Strict(room.path)
    with pytest.raises(UnsupportedConsistency, match="room keeps nothing"):
        room.run()
    assert room.slept == []


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 9), st.integers(0, 90)),
        st.tuples(st.just("dispatch"), st.sets(st.integers(0, 9)), st.none() | st.integers(0, 5)),
        st.tuples(st.just("die"), st.integers(1, 5)),
        st.tuples(st.just("wait"), st.integers(1, 60)),
    ),
    max_size=20,
)


@given(steps=STEPS)
def test_nothing_is_lost_or_early_whatever_happens(tmp_path_factory, steps):
    """Messages are stored, refused, sent over a connection that is lost, and leased by dispatchers that die."""
    room = Room(str(tmp_path_factory.mktemp("model") / "own.db"))
    due: dict[str, object] = {}
    arrived: Counter[str] = Counter()
    for kind, *values in [*steps, ("wait", 200), ("dispatch", set(), None)]:
        if kind == "store":
            name = f"m{values[0]}"
            if name not in due:
                due[name] = room.now + values[1] * SECOND
                room.store.store(message(name, due[name]))
        elif kind == "die":
            room.other().fetch_batch(room.now, values[0])
        elif kind == "wait":
            room.now += values[0] * SECOND
        else:
            transport = Transport(clock=lambda: room.now, lost_after=values[1])
            transport.refused = {f"m{number}" for number in values[0]}
            try:
                room.run(transport=transport, number_of_retries=99)
            except DelayedError:
                assert values[1] is not None
            arrived.update(transport.ids)
            assert all(delay <= timedelta(0) for delay in transport.delays.values())
    assert set(arrived) == set(due)
    assert room.left == {}


def operator(**options) -> CustomStoreDispatchOperator:
    return CustomStoreDispatchOperator(
        **{
            "task_id": "d",
            "store": "support.own_store:at_environment",
            "name": "own",
            "conn_id": "b",
            **options,
        }
    )


def test_by_the_operator_through_rabbitmq(tmp_path, monkeypatch, vhost: VirtualHost, connect):
    monkeypatch.setenv("OWN_STORE", str(tmp_path / "own.db"))
    store = FileStore(str(tmp_path / "own.db"))
    store.set_up_infrastructure()
    connect("b", **vhost.connection)
    vhost.declare("q")
    now = utcnow()
    for n in range(30):
        store.store(message(f"m{n}", now + n * SECOND / 10))
    store.store(message("later", now + 3600 * SECOND))
    assert operator().execute({})["dispatched"] == 30
    arrivals = vhost.collect("q", enough=30)
    assert sorted(one.message_id for one in arrivals) == sorted(f"m{n}" for n in range(30))
    assert all(one.received_at >= now + int(one.message_id[1:]) * SECOND / 10 for one in arrivals)
    assert store.next_due() == now + 3600 * SECOND


@pytest.mark.parametrize(
    "options, text",
    [
        ({"lookahead": -SECOND}, "lookahead=.* is negative"),
        ({"until": "done"}, "until='done' must be None"),
        ({"number_of_retries": -1}, "number_of_retries=-1"),
    ],
)
def test_what_cannot_be_is_an_error_when_the_dag_is_read(options, text):
    with pytest.raises(ValueError, match=text):
        operator(**options)


@pytest.mark.parametrize("store", ["support.own_store:Nothing", "support.nothing:x", "support", "", ":x"])
def test_a_store_that_is_not_found(connect, store):
    connect("b", conn_type="rabbitmq", host="localhost")
    with pytest.raises(ValueError, match=r"is not found: .*write it as 'package.module:name'"):
        operator(store=store).execute({})


def test_who_may_trigger_a_run_does_not_choose_what_is_called(connect):
    connect("b", conn_type="rabbitmq", host="localhost")
    task = operator(store="{{ which }}", name="{{ which }}")
    task.render_template_fields({"which": "support.own_store:at_environment"})
    assert task.name == "support.own_store:at_environment"
    with pytest.raises(ValueError, match=r"store='\{\{ which \}\}' is not found"):
        task.execute({})
