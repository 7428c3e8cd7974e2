"""What it means to a sender that the broker closed a channel. No network."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.errors import DelayedError, DestinationMissing, TopologyError
from airflow_delayed.rabbitmq.plan import ACCESS_REFUSED
from airflow_delayed.rabbitmq.topology import Topology

if TYPE_CHECKING:
    from pika.exceptions import ChannelClosedByBroker

_NOT_FOUND = re.compile(r"NOT_FOUND - no (?P<kind>queue|exchange) '(?P<name>.*?)' in vhost ")


def cause(
    conn_id: str, topology: Topology, reason: ChannelClosedByBroker, destination: str | None = None
) -> DelayedError | str:
    """Return the error, or a text where there is no class for it.

    :param destination: what was to be made ready; None if messages were published.
    """
    text = reason.reply_text
    found = _NOT_FOUND.match(text)
    if found and destination and found["name"] == destination:
        return DestinationMissing(
            conn_id,
            [destination],
            f"declare the {found['kind']}, or run TopologyInstallOperator(conn_id={conn_id!r},"
            f" topology={topology.name!r}, destinations=[{destination!r}], create_destinations=True)",
        )
    if found:
        finding = Finding(state=State.MISSING, resource=f"{found['kind']} {found['name']}")
        return TopologyError(conn_id, TopologyReport((finding,)), topology=topology.name)
    if reason.reply_code == ACCESS_REFUSED:
        return (
            f"the broker refused it: {text}. To send, the user needs the rights write and read on {topology.pattern},"
            " and write on the destinations"
        )
    return f"the broker refused it: {text}"
