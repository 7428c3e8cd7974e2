"""Bodies beyond the broker's max_message_size: the broker closes the channel, and names no message."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.rabbitmq import VirtualHost, messages
from support.send_runs import Run
from support.stores import Store

from airflow_delayed.errors import LimitExceeded, SendFailed
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.store.dispatch.report import DispatchFailed
from services import rabbitmq

MOST = 5000
PROBLEM = "has 6,000 bytes, and the broker takes 5,000 (max_message_size)"


@pytest.fixture(autouse=True)
def take_at_most(broker: rabbitmq.Broker) -> Iterator[Callable[[object], None]]:
    """Have the broker take bodies of up to 5,000 bytes, or what a test says."""

    def take_at_most(size: object) -> None:
        broker.eval(f"application:set_env(rabbit, max_message_size, {size})")
        broker.eval(f"persistent_term:put(max_message_size, {size})")

    before = broker.eval("element(2, application:get_env(rabbit, max_message_size))")
    take_at_most(MOST)
    yield take_at_most
    take_at_most(before)


def batch(count: int, large: set[int]) -> list[DelayedMessage]:
    """Messages that are due, of many sizes, and some that are too large."""
    return [
        DelayedMessage(
            destination=("orders", "letters")[number % 2],
            body=bytes(6000 if number in large else 37 * number % MOST),
            due_at=utcnow() - timedelta(seconds=1),
            message_id=f"m{number}",
        )
        for number in range(count)
    ]


def arrived(vhost: VirtualHost, ids: set[str]) -> Counter[str]:
    return Counter(one.message_id for one in vhost.collect("orders", "letters", enough=ids))


def test_a_send_names_it_and_delivers_the_messages_before_it_once(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("orders", "letters")
    with pytest.raises(SendFailed) as error:
        hook.send(batch(300, {150}))
    assert [message_id for message_id, _ in error.value.failures] == ["m150"]
    assert PROBLEM in str(error.value)
    assert isinstance(error.value.__cause__, LimitExceeded)
    assert error.value.__cause__.message_id == "m150"
    assert error.value.report.sent == 150
    ids = {f"m{number}" for number in range(150)}
    assert arrived(vhost, ids) == Counter(ids)


@pytest.mark.parametrize("kept", [True, False], ids=["rejects", "no rejects"])
def test_a_task_leaves_it_out_and_sends_the_others_once(
    kept: bool, run: Run, hook: RabbitMQDelayHook, vhost: VirtualHost, tmp_path: Path
) -> None:
    vhost.declare("orders", "letters")
    run.transport, run.now = hook, utcnow()
    rows = [
        {"value": one.body.decode(), "delay_seconds": 0, "message_id": one.message_id, "destination": one.destination}
        for one in batch(60, {20, 40})
    ]
    rejects = tmp_path / "rejects.jsonl"
    if kept:
        summary = run.execute(messages=rows, destination=None, rejects=str(rejects))
        assert (summary["sent"], summary["rejected"]) == (58, 2)
        found = [json.loads(line) for line in rejects.read_text().splitlines()]
        assert [(row["message_id"], row["rejected"]["column"]) for row in found] == [("m20", "body"), ("m40", "body")]
        assert PROBLEM in found[0]["rejected"]["problem"]
    else:
        # no retry, which would send all again
        with pytest.raises(AirflowFailException, match="2 of 60 rows cannot be sent: message m20, column body"):
            run.execute(messages=rows, destination=None)
    ids = {one.message_id for one in batch(60, set())} - {"m20", "m40"}
    assert arrived(vhost, ids) == Counter(ids)


@pytest.mark.parametrize("stays", [False, True], ids=["a run", "a dispatcher that stays"])
def test_a_dispatcher_gives_it_up_and_delivers_the_others_once(
    stays: bool, hook: RabbitMQDelayHook, vhost: VirtualHost, connect: Callable[..., str], tmp_path: Path
) -> None:
    vhost.declare("orders", "letters")
    store = Store(connect("store", conn_type="sqlite", host=str(tmp_path / "store.db")), None)
    stored = store.installed(deliver_conn_id="rabbit")
    # the first to a destination too, which a dispatcher that stays sends over a channel of its own
    stored.send(batch(300, {0, 150, 151}))
    with pytest.raises(DispatchFailed) as error:
        store.dispatcher(
            stored,
            deliver_conn_ids=["rabbit"],
            transports=lambda conn_id, clock: RabbitMQDelayHook(conn_id, clock=clock),
        ).run("empty" if stays else None)
    assert set(error.value.failures) == {"m0", "m150", "m151"}
    assert all(PROBLEM in reason for reason in error.value.failures.values())
    assert (error.value.report.dispatched, error.value.report.retried) == (297, 0)
    store.close()
    ids = {f"m{number}" for number in range(300)} - {"m0", "m150", "m151"}
    assert arrived(vhost, ids) == Counter(ids)


def test_small_bodies_that_are_too_large_are_found_too(
    take_at_most: Callable[[object], None], hook: RabbitMQDelayHook, vhost: VirtualHost
) -> None:
    """Those that are published beside others: what is unconfirmed then may come twice, and is not lost."""
    take_at_most(500)
    vhost.declare("orders", "letters")
    sent = messages("orders", [0] * 100)
    sent.insert(50, DelayedMessage(destination="orders", body=bytes(600), due_at=utcnow(), message_id="large"))
    with pytest.raises(SendFailed) as error:
        hook.send(sent)
    assert [message_id for message_id, _ in error.value.failures] == ["large"]
    ids = {f"m{number}" for number in range(error.value.report.sent)}
    assert len(ids) >= 50
    assert set(arrived(vhost, ids)) == ids
