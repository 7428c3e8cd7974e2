"""``airflow delayed doctor`` over a store, a broker and what does not answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta

import pytest
from support.commands import Command
from support.rabbitmq import VirtualHost
from support.standing import give_up
from support.stores import Store, Transport, message

from airflow_delayed.cli.doctor import Examination
from airflow_delayed.delivery import Finding, State
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import utcnow

pytestmark = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


@pytest.fixture
def doctor(airflow_command: Command) -> Callable[..., tuple[int, str]]:
    """The command: exit code and output."""

    def run(*words: str) -> tuple[int, str]:
        done = airflow_command("doctor", *words)
        return done.code, done.out + done.err

    return run


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that accepts and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_the_cause_of_late_messages_and_what_to_do(store: Store, doctor):
    hook = store.installed()
    assert doctor("--conn-id", store.conn_id) == (
        0,
        f"Dispatchers of store {store.conn_id}: none was at work within a day\n"
        f"Connections examined: {store.conn_id}. Errors: 0, other findings: 0.\n",
    )
    hook.send([message("late", hook.now() - timedelta(minutes=2))])
    code, out = doctor("--conn-id", store.conn_id)
    assert code == 1
    # the connection that delivers is examined too
    *others, first, what, remedy, _, summary = out.splitlines()
    assert first == f"error: connection {store.conn_id}: no-dispatcher"
    assert "1 overdue" in what
    assert remedy.startswith(
        "    What to do: let a dispatcher with 'broker' in its deliver_conn_ids run: a StoreDispatchOperator"
    )
    assert remedy.endswith(f"or: airflow delayed dispatcher --store-conn-id {store.conn_id} --deliver-conn-ids broker")
    assert others[0] == "error: connection broker: unreachable"
    assert "What to do: add the connection to Airflow, or correct its name" in others[2]
    assert summary.endswith("Errors: 2, other findings: 0.")
    code, out = doctor("--conn-id", store.conn_id, "-o", "json")
    _, found = json.loads(out)
    assert code == 1
    assert found.keys() == {"connection", "code", "severity", "where", "what", "remedy"}


def test_a_broker_that_is_away_comes_before_what_may_follow_from_it(store: Store, connect, doctor):
    connect("broker", conn_type="rabbitmq", host="127.0.0.1", port=1)
    hook = store.installed()
    hook.send([message("late", hook.now() - timedelta(minutes=2))])
    code, out = doctor("--conn-id", store.conn_id)
    assert code == 1
    assert [line for line in out.splitlines() if line.startswith("error: ")] == [
        "error: connection broker: unreachable",
        f"error: connection {store.conn_id}: no-dispatcher",
    ]


def test_the_gravest_comes_first_and_what_is_unknown_before_a_warning(store: Store, doctor, monkeypatch):
    states = [State.WARNING, State.BLOCKED, State.OK, State.UNKNOWN]
    found = [Finding(state=state, resource="queue q", found="it", code=state.value) for state in states]
    monkeypatch.setattr("airflow_delayed.cli.doctor.examine", lambda *_: {"c": Examination(found)})
    _, out = doctor("--conn-id", "c", "-o", "json")
    assert [each["severity"] for each in json.loads(out)] == ["error", "unknown", "warning"]


def test_each_connection_is_examined_whatever_the_others_do(store: Store, connect, silent, doctor, monkeypatch):
    monkeypatch.setattr("airflow_delayed.cli.doctor.EXAMINE_SECONDS", 8.0)
    store.installed()
    connect("hangs", conn_type="rabbitmq", host="127.0.0.1", port=silent)
    connect("refuses", conn_type="rabbitmq", host="127.0.0.1", port=1)
    code, out = doctor("--conn-id", store.conn_id, "--conn-id", "hangs", "--conn-id", "refuses", "--conn-id", "absent")
    assert code == 1
    assert "connection hangs: silent" in out
    assert "no answer within 8 s" in out
    assert "connection refuses: unreachable" in out
    assert "nothing listens on that host and port" in out
    assert "connection absent: unreachable" in out
    assert "isn't defined" in out
    assert f"Connections examined: {store.conn_id}, hangs, refuses, absent. Errors: 3" in out


def test_a_destination_is_that_of_the_brokers_or_of_a_store_alone(store: Store, connect, doctor):
    store.installed()
    connect("refuses", conn_type="rabbitmq", host="127.0.0.1", port=1)
    code, out = doctor("--conn-id", store.conn_id, "--conn-id", "refuses", "--destination", "orders")
    assert (code, out.count("error: ")) == (1, 1)
    assert "connection refuses: unreachable" in out
    code, out = doctor("--conn-id", store.conn_id, "--destination", "orders", "--destination", "invoices")
    assert (code, out.count("error: ")) == (1, 1)
    first, what, remedy, *_ = out.splitlines()
    assert first == f"error: connection {store.conn_id}: missing"
    # what has the same cause is one
    assert "orders" in what
    assert "invoices" in what
    assert f"airflow delayed install --conn-id {store.conn_id} --queue orders --queue invoices" in remedy


def test_it_names_the_dispatchers_at_work_and_else_the_last_one(store: Store, doctor):
    hook = store.installed()
    connections = ["broker", store.conn_id]
    with closing(store.dispatcher(hook, Transport(), deliver_conn_ids=connections)) as ended:
        ended.once()
    names = f"for broker, {store.conn_id} (on "
    out = doctor("--conn-id", store.conn_id)[1]
    assert f"Dispatchers of store {store.conn_id}: none is at work; the last one ended at 20" in out
    assert names in out
    store.dispatcher(hook, Transport(), deliver_conn_ids=connections, dag_id="nightly").once()
    (seen,) = (one for one in hook.dispatchers() if one.at_work)
    since = f"at work since {seen.started_at:%Y-%m-%d %H:%M:%S} UTC, {names}{seen.host}, DAG nightly)\n"
    assert f"Dispatchers of store {store.conn_id}: {since}" in doctor("--conn-id", store.conn_id)[1]


def test_the_destinations_of_what_waits_are_verified(store: Store, connect, doctor, vhost: VirtualHost, monkeypatch):
    """Over connections that are not named too: a dispatcher would give up all that goes to a missing queue."""
    connect("rabbit_shop", **vhost.connection)
    RabbitMQDelayHook("rabbit_shop").install(["orders"], create_destinations=True)
    hook = store.installed(deliver_conn_id="rabbit_shop")
    soon = hook.now() + timedelta(hours=1)
    hook.send(message(f"m{n}", soon, destination="reminders") for n in range(5))
    hook.send([message("fine", soon, destination="orders"), message("lost", soon, destination="two words")])
    store.hook(None).send([message("table", soon, destination="alarms")])
    give_up(hook, "lost", error="queue two words is gone")
    code, out = doctor("--conn-id", store.conn_id)
    assert code == 1
    assert "error: connection rabbit_shop: missing" in out
    assert f"(store {store.conn_id!r} has messages for it, which the first try would give up)" in out
    install = "airflow delayed install --conn-id"
    assert f"What to do: install what is missing: {install} rabbit_shop --queue reminders --queue 'two words'\n" in out
    assert f"What to do: install what is missing: {install} {store.conn_id} --queue alarms\n" in out
    assert "orders" not in out
    # what failed, why, and the command that sends it
    assert "1 were given up and are not tried again, most of them because: queue two words is gone" in out
    assert (
        f"airflow delayed retry --store-conn-id {store.conn_id} --destination 'two words'; then a dispatcher has" in out
    )
    assert f"Connections examined: {store.conn_id}, rabbit_shop. Errors: 3" in out
    # named, it has the same findings, once
    again = doctor("--conn-id", store.conn_id, "--conn-id", "rabbit_shop", "--destination", "reminders")[1]
    assert f"Connections examined: {store.conn_id}, rabbit_shop. Errors: 3" in again
    monkeypatch.setattr("airflow_delayed.cli.doctor.MAX_DESTINATIONS", 1)
    assert "stores have messages for 3 destinations, of which 1 were verified" in doctor("--conn-id", store.conn_id)[1]


def test_a_database_that_accepts_and_says_nothing_is_silent(store: Store, connect, silent, doctor):
    connect("hangs", conn_type="postgres", host="127.0.0.1", port=silent, extra={"connect_timeout": 2})
    code, out = doctor("--conn-id", "hangs")
    assert code == 1
    assert "error: connection hangs: silent" in out
    assert "What to do: look whether its database or broker hangs" in out


def test_without_names_it_examines_what_the_configuration_names(store: Store, doctor, monkeypatch):
    assert "There is nothing to examine: give --conn-id" in doctor()[1]
    store.installed()
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_STORES", store.conn_id)
    code, out = doctor()
    assert (code, out.splitlines()[-1]) == (0, f"Connections examined: {store.conn_id}. Errors: 0, other findings: 0.")


@pytest.mark.parametrize("seconds, text", [(-90, "s ahead of this machine"), (90, "s behind this machine"), (3, None)])
def test_a_clock_that_differs_from_this_machines(store: Store, doctor, monkeypatch, seconds: int, text: str | None):
    store.installed()
    monkeypatch.setattr("airflow_delayed.store.health.utcnow", lambda: utcnow() + timedelta(seconds=seconds))
    code, out = doctor("--conn-id", store.conn_id)
    # a warning
    assert code == 0
    if text is None:
        assert out.endswith("other findings: 0.\n")
    else:
        assert f"warning: connection {store.conn_id}: clock-difference" in out
        assert text in out
        assert "chronyc tracking" in out
