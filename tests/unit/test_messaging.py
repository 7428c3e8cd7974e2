"""The schemes of common.messaging's MessageQueueTrigger that are ours."""

from __future__ import annotations

import pytest
from airflow.providers.common.messaging.triggers.msg_queue import MESSAGE_QUEUE_PROVIDERS, MessageQueueTrigger
from airflow.sdk import Asset, AssetWatcher
from airflow.serialization.encoders import encode_trigger

RABBITMQ = "airflow_delayed.triggers.rabbitmq_message.RabbitMQMessageTrigger"
TABLE = "airflow_delayed.triggers.queue_table.QueueTableTrigger"


@pytest.mark.parametrize("scheme, path", [("delayed+rabbitmq", RABBITMQ), ("delayed+sql", TABLE)])
def test_a_scheme_is_our_trigger_with_all_its_parameters(scheme, path):
    trigger = MessageQueueTrigger(scheme=scheme, conn_id="c", queue_name="orders", pause=2, body=True)
    watcher = Asset("a", watchers=[AssetWatcher(name="w", trigger=trigger)]).watchers[0]
    expected = {"conn_id": "c", "queue": "orders", "pause": 2, "body": True}
    stored = encode_trigger(watcher.trigger)
    assert (stored["classpath"], trigger.serialize()) == (path, (path, expected))


def test_each_scheme_has_one_provider_and_no_address_is_ours():
    addresses = ["delayed+sql://c/orders", "https://sqs.eu-central-1.amazonaws.com/1/q", "rabbitmq://c/q", ""]
    for scheme in ("delayed+rabbitmq", "delayed+sql", "sqs"):
        assert len([one for one in MESSAGE_QUEUE_PROVIDERS if one.scheme_matches(scheme)]) == 1
    ours = [one for one in MESSAGE_QUEUE_PROVIDERS if type(one).__module__.startswith("airflow_delayed.")]
    assert len(ours) == 2
    assert not [one for one in ours for address in addresses if one.queue_matches(address)]


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (
            {"scheme": "delayed+sqlite"},
            "scheme 'delayed.sqlite' is not recognized by any",
        ),
        ({"scheme": "delayed+sql", "queue_name": ""}, "conn_id and queue must not be empty"),
    ],
)
def test_bad_input_is_named_when_the_dag_is_parsed(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        MessageQueueTrigger(**{"conn_id": "c", "queue_name": "orders", **arguments}).serialize()
