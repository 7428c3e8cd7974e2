"""What verify() and waiting() tell of a real broker, with its management API and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from support.rabbitmq import VirtualHost, eventually, messages

from airflow_delayed.delivery import State, TopologyReport
from airflow_delayed.errors import TopologyError
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import utcnow

Connect = Callable[..., str]


@pytest.fixture
def untagged(vhost: VirtualHost) -> Iterator[dict[str, object]]:
    """A user with all rights in the virtual host and none on the management API."""
    name = vhost.name.replace("/", "-")
    vhost.manage("PUT", f"users/{name}", {"password": "secret-word", "tags": ""})
    vhost.manage("PUT", f"permissions/{{vhost}}/{name}", {"configure": ".*", "write": ".*", "read": ".*"})
    yield {**vhost.connection, "login": name, "password": "secret-word"}
    vhost.manage("DELETE", f"users/{name}")


def findings(report: TopologyReport, code: str) -> list[str]:
    return [str(found) for found in report if found.code == code]


def stuck(vhost: VirtualHost, queue: str) -> int:
    return vhost.manage("GET", f"queues/{{vhost}}/{queue}").get("messages_dlx") or 0


def test_all_that_is_well_is_ok_and_no_more_is_said(using: Callable[..., RabbitMQDelayHook]) -> None:
    hook = using()
    hook.install(["orders"], create_destinations=True)
    eventually(lambda: hook.verify(["orders"]).counts() == {"ok": 105 + 7 + 3 + 1})


@pytest.mark.parametrize("way", ["no tag", "turned off", "nothing listens"])
def test_without_the_management_api_what_cannot_be_known_is_said_once(
    using: Callable[..., RabbitMQDelayHook],
    vhost: VirtualHost,
    connect: Connect,
    untagged: dict[str, object],
    way: str,
) -> None:
    if way == "no tag":
        hook, why = RabbitMQDelayHook(connect("plain", **untagged)), "needs the tag management"
    elif way == "turned off":
        hook, why = using(management_url="none"), "turns the management API off"
    else:
        hook, why = using(management_url="http://127.0.0.1:1"), "it cannot be reached"
    hook.install(["orders"], create_destinations=True)
    report = hook.verify(["orders"])
    assert report.ok
    unknown = [str(found) for found in report if found.state is State.UNKNOWN]
    version = vhost.manage("GET", "overview")["rabbitmq_version"]
    flags = 2 if tuple(map(int, version.split(".")[:2])) < (3, 12) else 0
    resources = [line.split(": unknown: ")[0] for line in unknown]
    assert [name for name in resources if not name.startswith("feature flag ")] == [
        "nodes of the cluster",
        "leaders and members of the queues",
        "bindings",
        "destinations that reject messages when full",
        "messages stuck in dead-lettering",
        "policies",
    ]
    assert len(resources) == 6 + flags
    assert all(why in line and "secret-word" not in line for line in unknown)
    found = hook.waiting()
    assert (found.messages, found.stuck) == (0, None)
    assert why in str(found)
    assert "at least 0" in str(found)
    with pytest.raises(TopologyError, match="queue missing: missing") as error:
        hook.install(["missing"])
    assert error.value.report.missing_destinations == ("missing",)


@pytest.mark.usefixtures("empty_vhost")
def test_arguments_that_could_not_be_compared_are_not_said_to_be_right(
    vhost: VirtualHost, connect: Connect, untagged: dict[str, object]
) -> None:
    RabbitMQDelayHook(connect("boss", **vhost.connection)).install([])
    with vhost.channel() as channel:
        channel.queue_delete("delayed.hex.0000020")
        channel.queue_declare("delayed.hex.0000020", durable=True)
    hook = RabbitMQDelayHook(connect("plain", **untagged))
    assert not hook.verify([]).ok
    vhost.manage("PUT", f"permissions/{{vhost}}/{untagged['login']}", {"configure": "^$", "write": ".*", "read": ".*"})
    line, _ = findings(hook.verify([]), "differs")
    assert line.startswith(
        "arguments of 115 exchanges and queues: unknown: this user may not configure them, and the management API at"
    )


def test_a_management_url_of_its_own(using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost) -> None:
    using().install(["orders"], create_destinations=True)
    scheme, place = vhost.management_url.split("://")
    url = f"{scheme}://{vhost.connection['login']}:{vhost.connection['password']}@{place}/"
    eventually(lambda: using(management_url=url).verify(["orders"]).counts() == {"ok": 105 + 7 + 3 + 1})
    with pytest.raises(ValueError, match="'management_url' must be"):
        using(management_url="rabbit:secret-word@host").verify([])


@pytest.mark.usefixtures("empty_vhost")
def test_a_full_destination_is_named_and_what_is_stuck_is_counted(
    using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost
) -> None:
    hook = using()
    vhost.declare("small", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    hook.install(["small", "orders"], create_destinations=True)
    (line,) = findings(hook.verify(["orders"]), "destination-full")
    assert line.startswith("queue small: rejects messages when it is full (max-length 1, an argument)")

    # a quorum queue is full when it holds more than its maximum; one by one, for it still takes what is under way then
    for number in range(2):
        hook.send(messages("small", [0], prefix=f"due{number}-"))
        vhost.until(small=number + 1)
    # into the level, however slow the machine is
    start = utcnow()
    RabbitMQDelayHook(hook.conn_id, clock=lambda: start).send(messages("small", [1] * 20, start=start, prefix="small"))
    eventually(lambda: stuck(vhost, "delayed.hex.0000001") > 0)
    # a queue that was just made has no statistics, and that is not taken for 0
    eventually(lambda: hook.waiting().stuck is not None)
    eventually(lambda: not hook.verify(["orders"]).ok)
    report = hook.verify(["orders"])
    (line,) = findings(report, "destination-full")
    assert line.startswith("queue small: full: ")
    waiting = hook.waiting()
    left = 22 - vhost.count("small")
    assert (waiting.levels[0].stuck, waiting.levels[0].messages, waiting.messages, waiting.stuck) == (left,) * 4
    assert findings(report, "stuck") == [
        f"queue delayed.hex.0000001: {left} due messages are not taken by where they go next; if that lasts, a"
        " destination is full or unroutable, and all behind them wait. What to do: consume, or declare, the destination"
        " that verify and the doctor name (destination-full, missing)"
    ]
    # without the management API none of them can be seen, and that is what is said
    blind = using(management_url="none").waiting()
    assert (blind.levels[0].stuck, blind.messages, blind.stuck) == (None, 0, None)
    assert "at least 0  unknown" in str(blind)


def test_what_a_slow_broker_was_not_asked_is_unknown(
    using: Callable[..., RabbitMQDelayHook], monkeypatch: pytest.MonkeyPatch
) -> None:
    using().install(["orders"], create_destinations=True)
    monkeypatch.setattr("airflow_delayed.rabbitmq.admin._PATIENCE", -1)
    report = using().verify(["orders"])
    (slow,) = (each for each in report if each.resource == "116 exchanges and queues")
    assert (slow.code, slow.severity) == ("node-down", "unknown")


def test_what_became_unroutable_is_told(using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost) -> None:
    hook = using()
    hook.install(["gone"], create_destinations=True)
    hook.send(messages("gone", [9] * 5))
    with vhost.channel() as channel:
        channel.queue_delete("gone")
    eventually(lambda: hook.waiting().unroutable == 5)
    for one in (hook, using(management_url="none")):
        assert findings(one.verify([]), "unroutable") == [
            "queue delayed.hex.unroutable: 5 messages whose destination was not there when they were due; redrive()"
            " sends them on"
        ]


def test_what_waits_where_and_until_when(using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost) -> None:
    hook = using()
    hook.install(["orders"], create_destinations=True)
    hook.send(messages("orders", [300] * 3 + [5000] * 2))
    waiting = hook.waiting()
    assert {level.level: level.messages for level in waiting.levels if level.messages} == {30: 3, 45: 2}
    assert waiting.messages == 5
    for level, longest in ((30, 0x1FF), (45, 0x1FFF)):
        found = waiting.levels[level]
        assert found.earliest == waiting.at
        assert found.latest - found.earliest == timedelta(seconds=longest)
    lines = str(waiting).splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["delayed.hex.0000100", "3"], ["delayed.hex.0001000", "2"]]
    with vhost.channel() as channel:
        channel.queue_delete("delayed.hex.0100000")
    assert "missing: delayed.hex.0100000" in str(hook.waiting())


@pytest.mark.usefixtures("empty_vhost")
def test_waiting_needs_something_installed(using: Callable[..., RabbitMQDelayHook]) -> None:
    with pytest.raises(TopologyError, match=r"delayed\.hex\.0000001: missing"):
        using().waiting()


@pytest.mark.usefixtures("empty_vhost")
def test_bindings_that_are_gone_or_wrong(using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost) -> None:
    hook = using()
    hook.install(["orders", "mail"], create_destinations=True)
    digits = hook.topology.digits
    with vhost.channel() as channel:
        # a digit of 8 in the second position, and zeros in the last three, after any higher digits
        key, zeros = digits.binding_key(1, 1, 8), digits.binding_key(2, 0, 0)
        assert (key, zeros) == ("*.*.*.*.*.8.#", "*.*.*.*.0.0.0.#")
        channel.queue_unbind("delayed.hex.0000080", "delayed.hex.last-2", key)
        channel.queue_bind("delayed.hex.0000080", "delayed.hex.last-2", "#")
        channel.exchange_unbind("delayed.hex.delivery", "delayed.hex.last-3", zeros)
        channel.queue_unbind("orders", "delayed.hex.delivery", hook.topology.binding_key("orders"))
        channel.queue_bind("mail", "delayed.hex.delivery", "#.mail")
    report = hook.verify(["orders", "mail"])
    assert [str(found) for found in report.problems] == [
        f"binding delayed.hex.last-2 -> delayed.hex.0000080 key: wanted {key!r}, found '#'",
        "binding delayed.hex.last-3 -> delayed.hex.delivery: missing. What to do: TopologyInstallOperator makes it"
        " again; redrive() sends on what became unroutable meanwhile",
    ]
    key_differs, extra, leak = findings(report, "differs")
    assert "wanted" in key_differs
    assert extra.startswith("binding delayed.hex.last-2 -> delayed.hex.0000080: with key '#'")
    assert leak.startswith("binding delayed.hex.delivery -> mail: its key '#.mail' is not exact")
    (unbound,) = findings(report, "unroutable")
    assert unbound.startswith("binding delayed.hex.delivery -> orders: missing")
    # those that are missing, an install makes
    hook.install(["orders", "mail"])
    assert hook.verify(["orders", "mail"]).ok


@pytest.mark.usefixtures("empty_vhost")
def test_policies_that_change_what_a_level_needs(using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost) -> None:
    hook = using()
    hook.install(["orders", "late"], create_destinations=True)
    for name, pattern, definition, sort in (
        ("short", "hex.0000[12]00$", {"message-ttl": 300_000}, "policies"),
        ("old", "hex.00[1-5]0000$", {"expires": 1_000_000}, "operator-policies"),
        ("back", "^late$", {"dead-letter-exchange": ""}, "policies"),
    ):
        body = {"pattern": pattern, "definition": definition, "apply-to": "queues"}
        vhost.manage("PUT", f"{sort}/{{vhost}}/{name}", body)
    report = hook.verify(["orders"])
    *lines, back = sorted(findings(report, "differs"))
    # 300 s is more than the first of them waits
    assert lines[0] == (
        "queue delayed.hex.0000200 message-ttl by policy 'short', which lets messages go on too early: wanted None,"
        " found 300000. What to do: narrow the policy's pattern so that it does not match the levels, such as"
        " ^(?!delayed[.])"
    )
    assert len(lines) == 1 + 5
    assert all("expires by operator policy 'old'" in line for line in lines[1:])
    assert not report.ok
    assert back.startswith("queue late: dead-letters to the default exchange (policy 'back')")
