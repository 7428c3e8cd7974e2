"""The connections that the page shows, by the section [delayed] of Airflow's configuration; no other is reached."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import HTTPException

from airflow_delayed import config
from airflow_delayed.ui.models import Kind


@dataclass(frozen=True, slots=True)
class Shown:
    """One connection, with the destination of SQS."""

    connection_id: str
    kind: Kind
    queue: str | None = None


def shown() -> list[Shown]:
    """Return all that is configured, in that order.

    :raises InvalidOption: an option makes no sense.
    """
    stores = [Shown(conn_id, "store") for conn_id in config.page_stores()]
    brokers = [Shown(conn_id, "rabbitmq") for conn_id in config.page_rabbitmq()]
    return [*stores, *brokers, *(Shown(conn_id, "sqs", queue) for conn_id, queue in config.page_sqs())]


def check(connection_id: str, kind: Kind, queue: str | None = None) -> None:
    """Look whether a connection of a path is configured.

    :raises HTTPException: 404, it is not.
    """
    if Shown(connection_id, kind, queue) not in shown():
        option = {"store": "page_stores", "rabbitmq": "page_rabbitmq", "sqs": "page_sqs"}[kind]
        raise HTTPException(404, f"not named by {option} of Airflow's configuration, section [{config.SECTION}]")
