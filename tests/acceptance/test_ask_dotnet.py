"""dags/ask_dotnet.py under a real scheduler and triggerer: each run goes on with the answer to its own question."""

from __future__ import annotations

import json
import secrets

import pika
import pytest
from support.leaks import leaks
from support.replying import QUEUE, RECORDED, reply_headers

from acceptance.conftest import World
from services import process

DAG = "ask_dotnet"
ENDPOINT = "acme.prices"
pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


def test_two_runs_one_queue_answers_crossed(world: World) -> None:
    live = world.live
    log = live.folder / "triggerer.log"
    process.wait_for(DAG, lambda: live.has(DAG), seconds=120, log=live.folder / "dag-processor.log")
    live.unpause(DAG)
    runs = {order: live.trigger(DAG, order=order) for order in (1, 2)}
    process.wait_for(
        "both waits", lambda: all(live.deferred(DAG, run, "answer") for run in runs.values()), seconds=240, log=log
    )
    asked = {json.loads(arrival.body)["Order"]: arrival for arrival in world.broker.collect(ENDPOINT, enough=2)}
    assert asked.keys() == runs.keys()
    hidden = f"hush{secrets.token_hex(12)}"
    with world.broker.channel() as channel:
        channel.confirm_delivery()
        for order in (2, 1):
            message_id, reply_id = asked[order].message_id, f"reply-{order}"
            assert asked[order].properties.headers["NServiceBus.ReplyToAddress"] == QUEUE
            fields = {"message_id": reply_id, "correlation_id": message_id}
            headers = {**reply_headers(message_id, reply_id), "Hidden": hidden}
            properties = pika.BasicProperties(**{**RECORDED["properties"], **fields, "headers": headers})
            body = json.dumps({"Price": 100 * order, "Hidden": hidden}).encode()
            channel.basic_publish("", QUEUE, body, properties)
    for order, run in runs.items():
        assert live.wait(DAG, run) == "success", live.states(DAG, run)
        assert live.result(DAG, run, "answer") == 100 * order
        assert f"the price is {100 * order}" in live.log(DAG, run, "go_on")
    assert world.broker.count(QUEUE) == 0
    assert leaks(world.metadata_url, world.fernet_key, live.folder, hidden) == []
