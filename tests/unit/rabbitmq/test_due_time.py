"""What a waiting message tells, against a simulated broker and its clock."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pika import BasicProperties

from airflow_delayed.nservicebus import nservicebus_time
from airflow_delayed.rabbitmq.levels import BITS, split_key
from airflow_delayed.rabbitmq.properties import ReceivedProperties
from airflow_delayed.rabbitmq.topology import (
    DELAYED,
    FORMER,
    NSERVICEBUS,
    NSERVICEBUS_DELAY,
    NSERVICEBUS_RETRIED,
    NSERVICEBUS_TIME_SENT,
    TOPOLOGIES,
    Topology,
    topology_of,
)
from airflow_delayed.rabbitmq.waiting import TOLERANCE, read, read_waited

UTC = timezone.utc
SENT = datetime(2025, 11, 28, 0, 5, 18, 653_833, tzinfo=UTC)
SECOND = timedelta(seconds=1)
DUE_AT = "airflow-delayed-due-at"

delays = st.integers(1, BITS.max_delay) | st.integers(1, 40) | st.integers(0, 27).map(lambda bit: 1 << bit)
names = st.sampled_from(["Sales", "Acme.Sales", "0.1.Sales", "é.x"])


def second(moment: datetime) -> datetime:
    return moment.replace(microsecond=0)


class Taken:
    """A message that was sent into the levels with this delay and taken in one of them.

    :param stop: at which of the levels of its bits.
    :param part: how much of that level's time it had waited.
    :param lag: what each dead-lettering took.
    """

    def __init__(
        self,
        delay: int,
        *,
        stop: int = 0,
        part: float = 0.5,
        lag: timedelta = timedelta(),
        topology: Topology = DELAYED,
    ) -> None:
        digits, rest, ways = topology.digits, delay, []
        while rest:
            ways.append(digits.entry_level(rest))
            rest = digits.rest(rest, ways[-1])
        self.level = ways[stop % len(ways)]
        self.topology = topology
        self.deaths: list[dict[str, Any]] = []
        self.now = SENT
        for level in ways[: ways.index(self.level)]:
            self.now += timedelta(seconds=digits.wait(level)) + lag
            name = topology.level_name(level)
            death = {"queue": name, "reason": "expired", "count": 1, "time": second(self.now), "exchange": name}
            self.deaths.insert(0, death)
        self.now += timedelta(seconds=digits.wait(self.level)) * part
        self.key = digits.routing_key(delay, "Acme.Sales")

    def read(self, headers: dict[str, Any] | None = None, timestamp: int | None = None) -> Any:
        found = BasicProperties(
            headers={**(headers or {}), **({"x-death": self.deaths} if self.deaths else {})}, timestamp=timestamp
        )
        return read(ReceivedProperties.of(found), self.key, topology=self.topology, level=self.level, now=self.now)


takings = st.builds(
    lambda delay, stop, part, lag, name: (
        delay,
        Taken(delay, stop=stop, part=part, lag=lag, topology=topology_of(name)),
    ),
    delays,
    st.integers(0, 27),
    st.floats(0, 1),
    st.timedeltas(timedelta(), timedelta(milliseconds=300)),
    st.sampled_from([*TOPOLOGIES, *FORMER]),
)


@given(delays, names)
def test_a_key_tells_delay_and_destination(delay: int, name: str) -> None:
    assert split_key(BITS.routing_key(delay, name)) == (delay, name)


@pytest.mark.parametrize(
    "key", ["", "orders", "delayed.level-09", "0." * 7, "0." * 6 + "g.x", "0." * 6 + "x", "00" * 7 + "x"]
)
def test_other_keys_tell_nothing(key: str) -> None:
    assert split_key(key) is None


@given(takings, st.timedeltas(timedelta(), SECOND - timedelta(microseconds=1)))
def test_our_header_is_exact(taken: tuple[int, Taken], rounding: timedelta) -> None:
    """Unless the broker itself is later than that by two seconds."""
    delay, message = taken
    due = SENT + timedelta(seconds=delay) - rounding
    found = message.read({DUE_AT: due.isoformat()})
    assert (found.destination, found.problem) == ("Acme.Sales", None)
    assert due <= found.due_at
    if len(message.deaths) < 4:
        assert found.due_at - due < 3 * SECOND
    if not message.deaths:
        assert found.due_at == due


@given(delays, st.floats(0, 0.999), st.floats(0, 0.999))
def test_our_header_is_exact_beside_a_timestamp(delay: int, rounding: float, part: float) -> None:
    """As our own messages have it: the timestamp is a whole second, and the delay rounded up."""
    assume(delay > 1)
    message = Taken(delay, part=part)
    due = SENT + timedelta(seconds=delay - rounding)
    assert message.read({DUE_AT: due.isoformat()}, timestamp=int(SENT.timestamp())).due_at == due


@given(delays, st.timedeltas(timedelta(), 2 * SECOND), st.floats(0, 1))
def test_a_timestamp_beats_the_header_of_an_earlier_way(delay: int, age: timedelta, part: float) -> None:
    """A consumer delays what it got anew, and copies the headers: they told the time at which it came."""
    message = Taken(delay, part=part)
    due = SENT + timedelta(seconds=delay)
    found = message.read({DUE_AT: (SENT - age).isoformat()}, timestamp=int(SENT.timestamp()))
    assert due <= found.due_at <= due + SECOND


@given(st.timedeltas(timedelta(), 2 * SECOND))
def test_the_longest_delay_is_kept_by_a_clock_that_is_ahead(ahead: timedelta) -> None:
    message = Taken(BITS.max_delay, part=0)
    due = SENT + timedelta(seconds=BITS.max_delay) + ahead
    assert message.read({DUE_AT: due.isoformat()}).due_at == due


@given(takings, st.timedeltas(timedelta(), timedelta(days=1)))
def test_a_broker_whose_clock_is_behind_makes_nothing_early(taken: tuple[int, Taken], behind: timedelta) -> None:
    """A message waits for all levels below its own, whatever any clock says."""
    delay, message = taken
    assume(message.deaths)
    message.deaths = [{**death, "time": death["time"] - behind} for death in message.deaths]
    below = timedelta(seconds=message.topology.digits.rest(delay, message.level))
    assert message.read().due_at >= message.now + below


def test_the_key_by_which_the_broker_goes_beats_the_header_of_another_one() -> None:
    forged: dict[str, Any] = {"airflow-delayed-routing-key": DELAYED.digits.routing_key(1 << 20, "admin-jobs")}
    found = Taken(9).read(forged, timestamp=int(SENT.timestamp()))
    assert (found.destination, found.due_at) == ("Acme.Sales", second(SENT) + 10 * SECOND)
    waited = read_waited(BasicProperties(headers=forged), BITS.routing_key(9, "Acme.Sales"), now=SENT)
    assert (waited.destination, waited.due_at) == ("Acme.Sales", SENT)


@given(takings, st.sampled_from(["sent", "retried", "both"]))
def test_nservicebus_tells_when_it_was_sent_or_scheduled_again(taken: tuple[int, Taken], how: str) -> None:
    delay, message = taken
    headers: dict[str, Any] = {NSERVICEBUS_DELAY: delay, NSERVICEBUS_TIME_SENT: nservicebus_time(SENT)}
    if how != "sent":
        headers[NSERVICEBUS_TIME_SENT] = nservicebus_time(SENT - timedelta(days=3))
        headers[NSERVICEBUS_RETRIED] = nservicebus_time(SENT)
    if how == "both":
        # of our own, which it keeps when it tries again
        headers[DUE_AT] = (SENT - timedelta(minutes=1)).isoformat()
    _never_early(message, delay, message.read(headers), timedelta())


@given(takings, st.floats(-2, 2))
def test_nservicebus_tells_when_it_is_due(taken: tuple[int, Taken], before: float) -> None:
    """The header replaces a time that is rounded up to the second; further away it is of another delivery or clock."""
    delay, message = taken
    sent: dict[str, Any] = {NSERVICEBUS_DELAY: delay, NSERVICEBUS_TIME_SENT: nservicebus_time(SENT)}
    due = SENT + timedelta(seconds=delay) - timedelta(seconds=before)
    found = message.read({**sent, "NServiceBus.DeliverAt": nservicebus_time(due)})
    if due <= SENT + timedelta(seconds=delay) < due + SECOND:
        assert found.due_at >= due
        assert message.deaths or found.due_at == due
    else:
        assert found == message.read(sent)


def test_our_own_header_is_read_before_nservicebuss() -> None:
    exact = SENT + timedelta(seconds=8.7)
    headers = {NSERVICEBUS_DELAY: 9, NSERVICEBUS_TIME_SENT: nservicebus_time(SENT), DUE_AT: exact.isoformat()}
    headers["NServiceBus.DeliverAt"] = nservicebus_time(exact - timedelta(seconds=0.5))
    assert Taken(9).read(headers).due_at == exact


@given(takings, st.floats(0, 0.999))
def test_celery_tells_an_eta(taken: tuple[int, Taken], fraction: float) -> None:
    """It rounds the delay down, so that its levels let a task go early; its worker waits for the eta."""
    delay, message = taken
    eta = SENT + timedelta(seconds=delay + fraction)
    found = message.read({"task": "work", "id": "1", "eta": eta.isoformat(), "timelimit": [None, None]})
    assert found.problem is None
    assert eta <= found.due_at or message.deaths
    assert SENT + timedelta(seconds=delay) <= found.due_at < eta + 2 * SECOND + len(message.deaths) * SECOND / 2


@given(takings)
def test_a_timestamp_tells_the_second_it_was_sent_in(taken: tuple[int, Taken]) -> None:
    delay, message = taken
    _never_early(message, delay, message.read(timestamp=int(SENT.timestamp())), SECOND)


@given(takings)
def test_the_broker_tells_when_a_message_left_the_level_above(taken: tuple[int, Taken]) -> None:
    delay, message = taken
    found = message.read()
    if message.deaths:
        _never_early(message, delay, found, SECOND)
    else:
        assert found.problem == "no header tells when it is due"
        # what it could still have to wait
        assert SENT + timedelta(seconds=delay) <= found.due_at


@given(takings, st.timedeltas(SECOND, timedelta(days=4000)), st.sampled_from(["due", "sent", "eta", "timestamp"]))
def test_what_is_provably_old_makes_nothing_early(taken: tuple[int, Taken], age: timedelta, which: str) -> None:
    """The headers are of an earlier way: the message came there and was sent on as it was."""
    delay, message = taken
    earlier = SENT - timedelta(seconds=delay) - age
    due = SENT - age
    headers: dict[str, dict[str, Any]] = {
        "due": {DUE_AT: due.isoformat()},
        "sent": {NSERVICEBUS_DELAY: delay, NSERVICEBUS_TIME_SENT: nservicebus_time(earlier)},
        "eta": {"task": "work", "eta": due.isoformat()},
    }
    # younger than what its level guarantees, it cannot be told from a true one
    below = timedelta(seconds=message.topology.digits.rest(delay, message.level))
    assume(message.deaths or due + SECOND < message.now + below - TOLERANCE)
    found = message.read(headers.get(which), timestamp=int(earlier.timestamp()) if which == "timestamp" else None)
    assert found.problem is None
    assert SENT + timedelta(seconds=delay) <= found.due_at
    assert found.due_at <= message.now + below + timedelta(seconds=message.topology.digits.wait(message.level)) + SECOND


def _never_early(message: Taken, delay: int, found: Any, late: timedelta) -> None:
    """Not before it was due, and later by no more than what was said and what the broker itself was late by."""
    due = SENT + timedelta(seconds=delay)
    assert found.problem is None
    assert found.destination == "Acme.Sales"
    assert due <= found.due_at
    broker = len(message.deaths) * timedelta(milliseconds=300) + SECOND if message.deaths else timedelta()
    assert found.due_at - due <= max(late, broker)


def test_a_death_that_was_early_or_of_another_way_does_not_count() -> None:
    message = Taken(0x4D, stop=1)
    due = SENT + timedelta(seconds=0x4D)
    assert message.read().due_at == second(SENT + 0x40 * SECOND) + 0xE * SECOND >= due
    for change in ({"reason": "delivery_limit"}, {"count": 2}, {"queue": "delayed.hex.0000001"}, {"time": None}):
        message.deaths = [{**Taken(0x4D, stop=1).deaths[0], **change}]
        assert message.read().problem == "no header tells when it is due"
    # and one that went too early is not made earlier than its header says
    message.deaths = [{**Taken(0x4D, stop=1).deaths[0], "reason": "delivery_limit"}]
    message.now = SENT + SECOND
    assert message.read({DUE_AT: due.isoformat()}).due_at == due


@pytest.mark.parametrize("queue", [["delayed.hex.0000040"], {"a": 1}, None, 7, "é"])
def test_deaths_that_are_made_up_by_hand_tell_nothing(queue: object) -> None:
    message = Taken(0x4D, stop=1)
    message.deaths = [*message.deaths, {"queue": queue, "reason": queue, "count": queue, "time": queue}]
    assert message.read().due_at is not None
    message.deaths = message.deaths[::-1]
    assert message.read().problem == "no header tells when it is due"


def test_a_delay_of_another_way_does_not_count() -> None:
    headers = {NSERVICEBUS_DELAY: 7, NSERVICEBUS_TIME_SENT: nservicebus_time(SENT + 100 * SECOND)}
    assert Taken(9).read(headers).problem == "no header tells when it is due"


@pytest.mark.parametrize("due", ["soon", 7, None, "2025-11-28T00:06:48"])
def test_a_header_that_is_no_time_tells_nothing(due: object) -> None:
    assert Taken(9).read({DUE_AT: due}).problem == "no header tells when it is due"


@pytest.mark.parametrize("timestamp", [2**63, 1_764_288_318_000])
def test_a_timestamp_that_is_none_tells_nothing(timestamp: int) -> None:
    message = Taken(9)
    found = message.read(timestamp=timestamp)
    assert found.problem == "no header tells when it is due"
    assert found.due_at == message.now + 9 * SECOND


def test_without_a_delay_in_its_key_our_headers_tell_all() -> None:
    due = SENT + 90 * SECOND
    headers = {DUE_AT: due.isoformat(), "airflow-delayed-destination": "Acme.Sales"}
    found = read(BasicProperties(headers=headers), "delayed.level-06", topology=NSERVICEBUS, level=6, now=SENT)
    assert (found.destination, found.due_at, found.problem) == ("Acme.Sales", due, None)
    found = read(BasicProperties(), "delayed.level-06", topology=NSERVICEBUS, level=6, now=SENT)
    assert found.problem == "neither its routing key nor a header tells its destination"


def test_what_came_out_of_the_levels_is_due() -> None:
    key = BITS.routing_key(90, "Acme.Sales")
    assert read_waited(BasicProperties(), key, now=SENT).due_at == SENT
    later = {DUE_AT: (SENT + SECOND).isoformat()}
    assert read_waited(BasicProperties(headers=later), key, now=SENT).due_at == SENT + SECOND


def test_what_was_parked_is_due_when_its_headers_say() -> None:
    headers: dict[str, object] = {"airflow-delayed-routing-key": BITS.routing_key(90, "Acme.Sales")}
    found = read_waited(BasicProperties(headers=headers), "delayed.set-aside", now=SENT)
    assert (found.destination, found.problem) == ("Acme.Sales", "no header tells when it is due")
    headers[DUE_AT] = SENT.isoformat()
    found = read_waited(BasicProperties(headers=headers), "delayed.set-aside", now=SENT)
    assert (found.destination, found.due_at, found.problem) == ("Acme.Sales", SENT, None)
    assert read_waited(BasicProperties(), "delayed.set-aside", now=SENT).destination is None
