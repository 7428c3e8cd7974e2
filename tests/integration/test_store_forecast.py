"""The forecast: what will be late, and until when, said before it happens; beside what then becomes of it."""

from __future__ import annotations

import random
from datetime import datetime, timedelta

import pytest
from support.sleeping import Time
from support.stores import Store, Transport, message

from airflow_delayed.delivery import State
from airflow_delayed.hooks.store import DelayedStoreHook

pytestmark = pytest.mark.long

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
on_sqlite = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


class SlowTransport(Transport):
    """Takes so many messages a second, by the test's time, and notes when it had each."""

    def __init__(self, time: Time, per_second: float) -> None:
        super().__init__()
        self.time = time
        self.per_second = per_second
        self.at: dict[str, datetime] = {}

    def send(self, messages):
        def taken():
            for one in messages:
                self.time.sleep(1 / self.per_second)
                self.at[one.message_id] = self.time.start + self.time.seconds * SECOND
                yield one

        return super().send(taken())


def run(
    store: Store, hook: DelayedStoreHook, per_second: float, ago: timedelta = timedelta(0), **policy: object
) -> dict[str, datetime]:
    """Dispatch all by a transport of that speed, from so long ago on; return when each message was sent."""
    time = Time(hook)
    time.start -= ago
    transport = SlowTransport(time, per_second)
    options = {"batch_size": 20, "stays": True, "lookahead": timedelta(0), **time.options(), **policy}
    store.dispatcher(hook, transport, **options).run("empty")
    return transport.at


def measured(store: Store, hook: DelayedStoreHook, per_second: float, **policy: object) -> None:
    """Let a dispatcher work for five minutes with more due than it sends, an hour ago."""
    due = hook.now() - timedelta(hours=2)
    hook.send(message(f"before-{number}", due) for number in range(round(5 * 60 * per_second)))
    run(store, hook, per_second, timedelta(hours=1), **policy)


def load(shape: str, start: datetime) -> list[datetime]:
    """Return due times, more than two a second for a while."""
    if shape == "at one second":
        return [start] * 600
    if shape == "evenly":
        return [start + number * SECOND / 3 for number in range(1200)] + [start + 10 * MINUTE] * 5
    # a rush that comes and goes, beside a steady stream
    steady = [start + number * SECOND for number in range(900)]
    return steady + [start + 3 * MINUTE + random.Random(7).triangular(0, 120, 60) * SECOND for _ in range(400)]


@pytest.mark.parametrize("shape", ["at one second", "evenly", "a rush"])
def test_it_ends_when_the_forecast_says(store: Store, shape: str):
    hook = store.installed()
    measured(store, hook, 2)
    dues = load(shape, hook.now() + 5 * MINUTE)
    hook.send(message(str(number), due) for number, due in enumerate(dues))
    (forecast,) = hook.forecast()
    assert (forecast.conn_id, forecast.destination) == ("broker", None)
    assert forecast.speed.per_second == pytest.approx(2, rel=0.05)
    sent = run(store, hook, 2)
    late = {at: at - dues[int(name)] for name, at in sent.items()}
    over = max(at for at, by in late.items() if by > 10 * SECOND)
    begin = min(at for at, by in late.items() if by > 10 * SECOND)
    assert abs(forecast.ends_at - over) < 0.15 * (over - begin)
    assert abs(forecast.late - max(late.values())) < 0.15 * max(late.values()) + 10 * SECOND


@on_sqlite
def test_max_rate_is_a_limit_before_anything_was_measured(store: Store):
    hook = store.installed()
    hook.send([message("first", hook.now())])
    run(store, hook, 1000, max_rate=2)
    due = hook.now() + 5 * MINUTE
    hook.send(message(str(number), due) for number in range(600))
    (forecast,) = hook.forecast()
    sent = run(store, hook, 1000, max_rate=2)
    assert abs(max(sent.values()) - forecast.ends_at) < 0.15 * (max(sent.values()) - due)
    assert "at 2 a second, the max_rate of its dispatchers" in str(forecast)
    assert "a higher max_rate" in forecast.finding("db").remedy


@on_sqlite
def test_the_rate_of_a_destination(store: Store):
    hook = store.installed()
    hook.set_rates({"sms": 2})
    due = hook.now() + 5 * MINUTE
    hook.send(message(str(number), due, destination="sms") for number in range(300))
    hook.send(message(f"mail-{number}", due, destination="mail") for number in range(300))
    (forecast,) = hook.forecast()
    sent = run(store, hook, 100_000)
    last = max(at for name, at in sent.items() if not name.startswith("mail"))
    assert (forecast.destination, forecast.messages) == ("sms", 300)
    assert abs(last - forecast.ends_at) < 0.15 * (last - due)
    finding = forecast.finding("db")
    assert (finding.code, finding.state) == ("forecast", State.WARNING)
    assert "300 messages to destination 'sms' for connection 'broker' are due at" in str(finding.found)
    assert "airflow delayed rates --store-conn-id db sms=" in finding.remedy


@on_sqlite
def test_twenty_loads_that_are_sent_in_time_give_no_alarm(store: Store):
    hook = store.installed()
    measured(store, hook, 5)
    start = hook.now() + 5 * MINUTE
    chance = random.Random(20)
    for number in range(20):
        due = start + number * 10 * MINUTE
        # up to 280 at one second, and in all up to nine tenths of what five a second are in ten minutes
        rush = [due + chance.randrange(300) * SECOND] * chance.randrange(280)
        evenly = [due + chance.uniform(0, 600) * SECOND for _ in range(chance.randrange(1, 2700 - len(rush)))]
        hook.send(message(f"{number}-{place}", one) for place, one in enumerate([*rush, *evenly]))
    assert hook.forecast() == []


@on_sqlite
def test_what_was_never_measured_is_not_known(store: Store):
    hook = store.installed()
    due = hook.now() + 5 * MINUTE
    hook.send(message(str(number), due) for number in range(9_999))
    assert hook.forecast() == []
    hook.send([message("one-more", due)])
    (forecast,) = hook.forecast()
    assert (forecast.speed, forecast.ends_at) == (None, None)
    assert "when the last is dispatched is not known yet" in str(forecast)


@on_sqlite
def test_a_light_load_is_no_measure(store: Store):
    """A dispatcher that has little to do shows no speed."""
    hook = store.installed()
    due = hook.now() - timedelta(hours=1)
    hook.send(message(f"light-{number}", due + number * SECOND) for number in range(300))
    run(store, hook, 50, timedelta(hours=1))
    hook.send(message(str(number), hook.now() + 5 * MINUTE) for number in range(10_000))
    (forecast,) = hook.forecast()
    assert forecast.speed is None


@on_sqlite
def test_what_another_program_wrote_breaks_nothing(store: Store):
    hook = store.installed()
    hook.send(message(str(number), hook.now() + MINUTE) for number in range(200))
    values = {"ConnIds": '["broker"]', "StartedAt": hook.now(), "SeenAt": hook.now(), "Reaches": '{"broker": 3}'}
    with hook.engine.begin() as connection:
        for number, rate in enumerate((1e-300, -1, 1e300)):
            connection.execute(hook.tables.dispatchers.insert().values(Id=str(number), MaxRate=rate, **values))
    hook.forecast()
    with hook.engine.begin() as connection:
        connection.execute(hook.tables.dispatchers.delete().where(hook.tables.dispatchers.c.Id == "2"))
        connection.execute(hook.tables.dispatchers.delete().where(hook.tables.dispatchers.c.Id == "1"))
    (forecast,) = hook.forecast()
    assert forecast.late > timedelta(days=300)
