"""Who stays, sends at the due time: ``lookahead="auto"``, what is sent ahead, and beside whom."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy import update
from support.rabbitmq import VirtualHost
from support.sleeping import Time
from support.stores import Store, Transport, message, on_postgres_only, on_postgres_too

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.store.dispatch.report import DispatchFailed

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)


def auto(store: Store, hook, transport: Transport, time: Time, *, stays: bool, **options):
    """A dispatcher on a clock of the test's own."""
    return store.dispatcher(hook, transport, **time.options(), stays=stays, **{"lookahead": "auto", **options})


@on_postgres_too
def test_one_that_stays_sends_when_due_and_nothing_ahead(store: Store):
    hook, transport = store.installed(), Transport(sooner_when_due=True)
    time = Time(hook)
    dues = {"soon": 10, "later": 20, "next": 200}
    hook.send(message(name, time.start + seconds * SECOND) for name, seconds in dues.items())
    auto(store, hook, transport, time, stays=True).run(MINUTE)
    assert transport.ids == ["soon", "later"]
    assert [transport.delays[name] for name in transport.ids] == [timedelta(0)] * 2
    assert {one.message_id for one in hook.list()} == {"next"}
    # a claimed message cannot be cancelled
    assert hook.lookaheads()["broker"] == SECOND / 5


@pytest.mark.parametrize("silent, ids", [(8, ["due"]), (10, ["due", "next"])], ids=["at work", "killed"])
def test_a_run_beside_one_that_stays_sends_what_is_due(store: Store, silent: int, ids: list[str]):
    hook = store.installed()
    time = Time(hook)
    hook.send(message(name, time.start + seconds * SECOND) for name, seconds in (("due", 5), ("next", 300)))
    auto(store, hook, Transport(sooner_when_due=True), time, stays=True).once()
    time.seconds += silent
    transport = Transport(sooner_when_due=True)
    auto(store, hook, transport, time, stays=False).run()
    assert transport.ids == ids


def test_what_anybody_else_writes_into_a_sign_of_life_counts_for_nothing(store: Store):
    hook = store.installed()
    store.dispatcher(hook, Transport(), stays=True).once()
    table = hook.tables.dispatchers
    for text in ("", "[]", '{"broker": 5}', '{"broker": [1]}', '{"broker": ["1", 2]}', '{"broker": [1e99, NaN]}'):
        with hook.engine.begin() as connection:
            connection.execute(update(table).values(Reaches=text))
        assert set(hook.lookaheads().values()) == {timedelta(0)}


@pytest.mark.parametrize(
    "options", [{"lookahead": 15 * MINUTE}, {"sooner_when_due": False}, {"stays": False}], ids=["fixed", "sqs", "ends"]
)
def test_what_is_sent_ahead(store: Store, options):
    hook = store.installed()
    time = Time(hook)
    hook.send(message(name, time.start + due * MINUTE) for name, due in (("a", 14), ("b", 14.9)))
    transport = Transport(horizon=14.5 * MINUTE, sooner_when_due=options.pop("sooner_when_due", True))
    auto(store, hook, transport, time, **{"stays": True, **options}).once()
    assert transport.ids == ["a"]


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_through_rabbitmq_they_pass_no_level(store: Store, vhost: VirtualHost, connect: Callable[..., str]):
    connect("rabbit", **vhost.connection)
    vhost.declare("orders")
    hook = store.installed(deliver_conn_id="rabbit")
    due = hook.now() + 2 * SECOND
    names = {f"m{number}" for number in range(300)}
    hook.send(message(name, due, destination="orders") for name in names)
    hook.send([message("next", due + 10 * MINUTE, destination="orders")])
    hook.dispatcher(["rabbit"], lambda name, clock: RabbitMQDelayHook(name, clock=clock), stays=True).run(4 * SECOND)
    arrivals = vhost.collect("orders", enough=names)
    assert {each.message_id for each in arrivals} == names
    assert not [each for each in arrivals if each.received_at < each.due_at or "x-death" in each.properties.headers]
    assert (hook.count(), len(arrivals)) == (1, 300)


def test_a_transport_without_a_horizon_says_so(store: Store):
    hook = store.installed()
    time = Time(hook)
    hook.send([message("a", time.start)])
    transport = Transport()
    transport.horizon = None
    with pytest.raises(DispatchFailed, match="'broker': Transport has no horizon, so lookahead='auto' does not know"):
        auto(store, hook, transport, time, stays=False).run()
    auto(store, hook, transport, time, stays=False, lookahead=MINUTE).run()
    assert transport.ids == ["a"]


@on_postgres_only
def test_a_table_that_was_never_analyzed_is_not_read_again_for_each_claim(store: Store):
    """A first night: the planner takes the due messages for few, and would read and sort all that are left."""
    hook = store.hook()
    hook.install(())
    due = hook.now() - SECOND
    hook.send(message(f"m{number:04}", due + number * SECOND / 10_000) for number in range(3000))
    read = "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_user_tables WHERE relid = '{s}delayed_messages'::regclass"

    def reads() -> int:
        # a connection writes its figures when it ends
        hook.close()
        return int(store.sql(hook, read)[0][0])

    before = reads()
    transport = Transport()
    assert store.dispatcher(hook, transport, batch_size=100).run().dispatched == 3000
    # each when it is claimed and when it is removed, and some once more
    assert reads() - before < 5 * 3000
