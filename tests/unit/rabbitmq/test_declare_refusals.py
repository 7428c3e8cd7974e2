from __future__ import annotations

import pytest
from pika.exceptions import ChannelClosedByBroker

from airflow_delayed.rabbitmq.declare import refusal_cause
from airflow_delayed.rabbitmq.topology import CELERY


@pytest.mark.parametrize(
    "code, text, destination, error",
    [
        (
            404,
            "NOT_FOUND - no queue 'orders' in vhost '/'",
            "orders",
            "connection 'rabbit' has no destination orders; declare the queue, or run TopologyInstallOperator("
            "conn_id='rabbit', topology='celery', destinations=['orders'], create_destinations=True)",
        ),
        (
            404,
            "NOT_FOUND - no exchange 'celery_delayed_delivery' in vhost '/'",
            "orders",
            "connection 'rabbit' is not ready: exchange celery_delayed_delivery: missing. TopologyInstallOperator("
            "conn_id='rabbit', topology='celery', ...) makes what is missing; its dry_run=True shows the plan",
        ),
        (
            403,
            "ACCESS_REFUSED - write access to queue 'orders' in vhost '/' refused for user 'u'",
            "orders",
            "the broker refused it: ACCESS_REFUSED - write access to queue 'orders' in vhost '/' refused for user 'u'."
            " To send, the user needs the rights write and read on ^(celery_delayed_), and write on the destinations",
        ),
        (
            406,
            "PRECONDITION_FAILED - message size 2 is larger than configured max size 1",
            None,
            "the broker refused it: PRECONDITION_FAILED - message size 2 is larger than configured max size 1",
        ),
    ],
)
def test_a_refusal_says_what_to_do(code: int, text: str, destination: str | None, error: str) -> None:
    assert str(refusal_cause("rabbit", CELERY, ChannelClosedByBroker(code, text), destination)) == error
