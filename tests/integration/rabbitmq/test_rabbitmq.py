"""The RabbitMQ hook on a real broker: topology, timing, addressing, refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone

import pytest
from support.rabbitmq import DESTINATION, DUE_AT, VirtualHost, eventually, messages

from airflow_delayed.errors import (
    DestinationMissing,
    LimitExceeded,
    SendFailed,
    TopologyError,
    TransportUnavailable,
)
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.rabbitmq.topology import DELAYED

UTC = timezone.utc
Connect = Callable[..., str]
#: Exchanges and queues of the default topology and of one destination, and their bindings.
PARTS, BINDINGS = (7 + 2) + (105 + 2), (420 + 7) + 1 + 1


@pytest.mark.usefixtures("empty_vhost")
def test_install_makes_what_is_missing_and_nothing_the_second_time(hook: RabbitMQDelayHook) -> None:
    assert not hook.verify(["orders"]).ok
    first = hook.install(["orders"], create_destinations=True)
    assert first.counts() == {"created": PARTS + BINDINGS}
    assert hook.verify(["orders"]).ok
    again = hook.install(["orders"], create_destinations=True)
    assert again.counts() == {"ok": PARTS}


@pytest.mark.usefixtures("empty_vhost")
def test_a_dry_run_makes_nothing(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    plan = hook.install(["orders"], create_destinations=True, dry_run=True)
    assert plan.counts() == {"would create": PARTS + BINDINGS}
    assert vhost.manage("GET", "queues/{vhost}") == []
    assert not [found for found in vhost.manage("GET", "exchanges/{vhost}") if found["name"].startswith("delayed")]


def test_the_topology_survives_a_restart(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    hook.install(["orders"], create_destinations=True)
    ours = [found for found in vhost.manage("GET", "exchanges/{vhost}") if found["name"].startswith("delayed")]
    queues = vhost.manage("GET", "queues/{vhost}")
    assert len(ours) == 7 + 2
    assert len(queues) == 105 + 2
    assert all(found["durable"] and not found["auto_delete"] for found in (*ours, *queues))


@pytest.mark.usefixtures("empty_vhost")
def test_install_reports_a_missing_destination_and_makes_nothing(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("orders")
    with pytest.raises(TopologyError, match="queue invoices: missing") as error:
        hook.install(["orders", "invoices"])
    assert error.value.report.missing_destinations == ("invoices",)
    assert [found["name"] for found in vhost.manage("GET", "queues/{vhost}")] == ["orders"]


def test_a_destination_of_any_kind_is_taken_as_it_is(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("old", **{"x-queue-type": "classic", "x-max-length": 100_000})
    assert hook.install(["old"], create_destinations=True).ok
    hook.send(messages("old", [1]))
    assert len(vhost.collect("old", enough=1)) == 1


def test_verify_wants_only_the_levels_that_a_delay_needs(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    hook.install(["orders"], create_destinations=True)
    with vhost.channel() as channel:
        channel.queue_delete("delayed.hex.0000010")
    assert hook.verify(["orders"], max_delay=timedelta(seconds=15)).ok
    assert hook.verify(["orders"], max_delay=timedelta(0)).ok
    # 15 s and a bit is 16 s
    report = hook.verify(["orders"], max_delay=timedelta(seconds=15, microseconds=1))
    assert [str(found) for found in report.problems] == ["queue delayed.hex.0000010: missing"]


def test_each_message_arrives_once_and_never_early(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("orders")
    batch = messages("orders", [number % 51 / 10 for number in range(204)])
    report = hook.send(batch)
    assert (report.sent, report.by_destination) == (204, {"orders": 204})
    assert (report.first_due, report.last_due) == (batch[0].due_at, batch[50].due_at)

    arrivals = vhost.collect("orders", enough=204)
    assert Counter(arrival.message_id for arrival in arrivals) == Counter(message.message_id for message in batch)
    assert {arrival.message_id: arrival.due_at for arrival in arrivals} == {m.message_id: m.due_at for m in batch}
    early = [arrival for arrival in arrivals if arrival.received_at < arrival.due_at]
    assert not early
    assert vhost.count("delayed.hex.unroutable") == 0


def test_what_a_message_looks_like(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("orders")
    due = utcnow() + timedelta(seconds=1)
    headers = {"content-type": "application/json", "customer": "Æther", "x-death": "copied from one received"}
    for body, message_id, fields in ((b"{}", "a", headers), (b"\x00\xff", "b", {})):
        hook.send([DelayedMessage(destination="orders", body=body, due_at=due, message_id=message_id, headers=fields)])
    arrivals = {arrival.message_id: arrival for arrival in vhost.collect("orders", enough=2)}
    assert {key: arrival.body for key, arrival in arrivals.items()} == {"a": b"{}", "b": b"\x00\xff"}
    a, b = arrivals["a"].properties, arrivals["b"].properties
    assert (a.content_type, b.content_type) == ("application/json", "application/octet-stream")
    assert a.delivery_mode == 2
    assert abs(a.timestamp - datetime.now(UTC).timestamp()) < 300
    assert {name: value for name, value in a.headers.items() if not name.startswith("x-")} == {
        "content-type": "application/json",
        "customer": "Æther",
        DUE_AT: due.isoformat(timespec="microseconds"),
        DESTINATION: "orders",
    }
    assert a.headers["x-death"] != headers["x-death"]


def test_dotted_destinations_do_not_leak(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("Sales", "Acme.Sales")
    hook.send([*messages("Acme.Sales", [1] * 20, prefix="acme"), *messages("Sales", [1] * 10, prefix="own")])
    assert len(vhost.collect("Acme.Sales", enough=20)) == 20
    own = vhost.collect("Sales", enough=10)
    assert sorted(arrival.message_id for arrival in own) == sorted(f"own{number}" for number in range(10))


def test_a_missing_destination_is_an_error_and_nothing_is_sent(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("orders")
    with pytest.raises(DestinationMissing, match="'rabbit' has no destination nowhere; declare the queue") as error:
        hook.send([*messages("nowhere", [0, 1]), *messages("orders", [0])])
    assert error.value.destinations == ("nowhere",)
    assert [queue for queue in _waiting(vhost) if queue[1]] == []


def test_a_destination_missing_further_on_is_counted(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("orders")
    batch = [*messages("orders", [0] * 5), *messages("nowhere", [1], prefix="n"), *messages("orders", [0], prefix="z")]
    with pytest.raises(
        SendFailed, match=r"confirmed 5 messages and not 1: message n0: .* no destination nowhere"
    ) as error:
        hook.send(batch)
    assert error.value.report.sent == 5
    assert isinstance(error.value.__cause__, DestinationMissing)
    assert vhost.count("orders") == 5


@pytest.mark.usefixtures("empty_vhost")
def test_without_install_sending_says_what_to_do(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("orders")
    with pytest.raises(TopologyError, match=r"exchange delayed.hex.delivery: missing.* TopologyInstallOperator"):
        hook.send(messages("orders", [1]))


def test_a_level_that_is_missing_is_an_error(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("orders")
    with vhost.channel() as channel:
        channel.queue_delete("delayed.hex.0000020")
    with pytest.raises(SendFailed, match=r"message m0: returned .* NO_ROUTE \(a delay level's queue is gone; Topology"):
        hook.send(messages("orders", [40]))
    assert hook.send(messages("orders", [20])).sent == 1


def test_without_the_direct_entry_a_missing_level_is_an_error_too(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    hook.install([])
    vhost.declare("orders", **{"x-dead-letter-exchange": ""})
    with vhost.channel() as channel:
        channel.exchange_delete("delayed.hex.entry")
    with pytest.raises(SendFailed, match=r"confirmed 0 messages and not 1: .*exchange delayed.hex.entry: missing"):
        hook.send(messages("orders", [40]))
    hook.install(["orders"])
    with vhost.channel() as channel:
        channel.queue_delete("delayed.hex.0000020")
    with pytest.raises(SendFailed, match=r"message m0: returned by the broker as NO_ROUTE .*'delayed.hex.entry'"):
        hook.send(messages("orders", [40]))


@pytest.mark.usefixtures("empty_vhost")
def test_what_a_level_refuses_for_good_is_named(using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost) -> None:
    hook = using(confirm_timeout=12)
    hook.install(["orders"], create_destinations=True)
    _fill(hook, vhost, level=31)
    batch = [*messages("orders", [0] * 3, prefix="due"), *messages("orders", [600] * 30, prefix="late")]
    with pytest.raises(SendFailed, match=r"refused by the broker \d+ times in \d+ s") as error:
        hook.send(batch)
    assert error.value.report.sent == 3
    # the broker confirms and refuses in any order
    assert {message_id for message_id, _ in error.value.failures} == {message.message_id for message in batch[3:]}


@pytest.mark.usefixtures("empty_vhost")
def test_a_refusal_that_passes_loses_nothing(vhost: VirtualHost, connect: Connect) -> None:
    published = 0

    def clock() -> datetime:
        nonlocal published
        published += 1
        return datetime.now(UTC)

    hook = RabbitMQDelayHook(connect("rabbit", **vhost.connection), clock=clock)
    hook.install(["orders"], create_destinations=True)
    ids: list[str] = []
    # on a slow machine the level may be empty again: then nothing is refused, and nothing is shown
    while published <= 10:
        _fill(hook, vhost, level=4)
        published = 0
        batch = messages("orders", [4.9] * 10, prefix=f"m{len(ids)}-")
        ids += [message.message_id for message in batch]
        assert hook.send(batch).sent == 10
    arrivals = [found for found in vhost.collect("orders", enough=ids) if found.message_id.startswith("m")]
    assert Counter(arrival.message_id for arrival in arrivals) == Counter(ids)
    assert all(arrival.received_at >= arrival.due_at for arrival in arrivals)


def _fill(hook: RabbitMQDelayHook, vhost: VirtualHost, level: int) -> None:
    """Let a level hold one message, and put 50 into it: what is under way when it gets full is still taken."""
    name = DELAYED.level_name(level)
    vhost.manage(
        "PUT", "policies/{vhost}/full", {"pattern": f"^{name}$", "definition": {"max-length": 1}, "apply-to": "queues"}
    )
    eventually(lambda: vhost.manage("GET", f"queues/{{vhost}}/{name}").get("policy") == "full")
    # on a slow machine it is full before all are written
    with suppress(SendFailed):
        hook.send(messages("orders", [DELAYED.digits.wait(level) - 0.1] * 50, prefix="fill"))


def test_a_queue_deleted_while_messages_wait(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("gone", "orders")
    hook.send([*messages("gone", [9] * 5, prefix="gone"), *messages("orders", [10] * 5)])
    with vhost.channel() as channel:
        channel.queue_delete("gone")
    # kept, and in nobody's way
    assert len(vhost.collect("orders", enough=5)) == 5
    unroutable = vhost.collect("delayed.hex.unroutable", enough=5)
    assert {arrival.message_id for arrival in unroutable} == {f"gone{number}" for number in range(5)}
    assert {arrival.properties.headers[DESTINATION] for arrival in unroutable} == {"gone"}


def test_an_error_of_the_source_is_told_after_what_was_taken_is_confirmed(
    hook: RabbitMQDelayHook, vhost: VirtualHost
) -> None:
    vhost.declare("orders")

    def stream() -> Iterator[DelayedMessage]:
        yield from messages("orders", [0] * 7)
        raise OSError("the file ends in the middle")

    with pytest.raises(OSError, match="in the middle"):
        hook.send(stream())
    assert vhost.count("orders") == 7


def test_sending_nothing_needs_no_broker(connect: Connect) -> None:
    hook = RabbitMQDelayHook(connect("rabbit", conn_type="rabbitmq", host="127.0.0.1", port=1))
    assert hook.send([]).sent == 0


@pytest.mark.parametrize(
    "change, column",
    [
        ({"destination": "a..b"}, "destination"),
        ({"destination": "x" * 242}, "destination"),
        ({"due_at": utcnow() + timedelta(days=3107)}, "delay"),
        ({"headers": {"CC": "other"}}, "headers"),
        ({"headers": {"n" * 256: "long"}}, "headers"),
        ({"headers": {"content-type": "t" * 256}}, "headers"),
        ({"headers": {"expiration": "5000"}, "due_at": utcnow() + timedelta(days=1)}, "headers"),
    ],
)
def test_limits_are_known_before_and_kept_when_sending(
    hook: RabbitMQDelayHook, vhost: VirtualHost, change: dict[str, object], column: str
) -> None:
    vhost.declare("orders")
    due = utcnow() + timedelta(seconds=1)
    message = DelayedMessage(**{"destination": "orders", "body": b"", "due_at": due, "message_id": "1", **change})
    for use in (lambda: hook.check(message, utcnow()), lambda: hook.send([message])):
        with pytest.raises(LimitExceeded) as error:
            use()
        assert error.value.column == column
    assert [queue for queue in _waiting(vhost) if queue[1]] == []


def test_a_horizon_of_seven_digits(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("orders")
    assert hook.horizon == timedelta(seconds=268_435_455)
    hook.send([DelayedMessage(destination="orders", body=b"", due_at=utcnow() + hook.horizon, message_id="far")])
    vhost.until(**{"delayed.hex.f000000": 1})


def test_a_connection_says_what_is_wrong_with_it(hook: RabbitMQDelayHook, vhost: VirtualHost, connect: Connect) -> None:
    well, text = hook.test_connection()
    assert well, text
    assert vhost.name in text
    for change, cause in (
        ({"port": 1}, "nothing listens"),
        ({"password": "hunter2"}, "login refused"),
        ({"schema": "nowhere"}, "virtual host"),
        ({"host": "no-such-host.invalid"}, "cannot be resolved"),
        ({"extra": {"ssl": True}}, "TLS"),
        ({"extra": {"ssl": "maybe"}}, "must be true or false"),
        ({"extra": {"topology": "none"}}, "topology 'none' is unknown; use one of delayed, nservicebus"),
    ):
        bad = RabbitMQDelayHook(connect("bad", **{**vhost.connection, **change}))
        well, text = bad.test_connection()
        assert not well
        assert cause in text
        assert "hunter2" not in text
        if "extra" not in change:
            for use in (lambda: bad.send(messages("orders", [1])), lambda: bad.verify([])):  # noqa: B023
                with pytest.raises(TransportUnavailable, match=cause):
                    use()


def _waiting(vhost: VirtualHost) -> list[tuple[str, int]]:
    """Count what lies in each queue, asked over AMQP, which is up to date."""
    names = [
        queue["name"] for queue in vhost.manage("GET", "queues/{vhost}?disable_stats=true&enable_queue_totals=true")
    ]
    with vhost.channel() as channel:
        return [(name, channel.queue_declare(name, passive=True).method.message_count) for name in names]
