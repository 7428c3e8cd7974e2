"""The connections that the page shows, by the section [delayed] of Airflow's configuration; no other is reached."""

from __future__ import annotations

from dataclasses import dataclass

from airflow.configuration import conf
from fastapi import HTTPException

from airflow_delayed.ui.models import Kind

_SECTION = "delayed"
_BODY_LIMIT = 16_384


@dataclass(frozen=True, slots=True)
class Shown:
    """One connection, with the destination of SQS."""

    connection_id: str
    kind: Kind
    queue: str | None = None


def shown() -> list[Shown]:
    """Return all that is configured, in that order."""
    stores = [Shown(conn_id, "store") for conn_id in _names("page_stores")]
    brokers = [Shown(conn_id, "rabbitmq") for conn_id in _names("page_rabbitmq")]
    pairs = [pair.rpartition(":") for pair in _names("page_sqs")]
    return [*stores, *brokers, *(Shown(conn_id, "sqs", queue) for conn_id, _, queue in pairs)]


def check(connection_id: str, kind: Kind, queue: str | None = None) -> None:
    """Look whether a connection of a path is configured.

    :raises HTTPException: 404, it is not.
    """
    if Shown(connection_id, kind, queue) not in shown():
        raise HTTPException(404, f"not among the {_OPTIONS[kind]} of Airflow's configuration, section [{_SECTION}]")


def body_limit() -> int:
    """Return how many bytes of a body are shown at most."""
    return conf.getint(_SECTION, "page_body_limit", fallback=_BODY_LIMIT)


_OPTIONS: dict[Kind, str] = {"store": "page_stores", "rabbitmq": "page_rabbitmq", "sqs": "page_sqs"}


def _names(option: str) -> list[str]:
    given = conf.get(_SECTION, option, fallback="").split(",")
    return list(dict.fromkeys(name for part in given if (name := part.strip())))
