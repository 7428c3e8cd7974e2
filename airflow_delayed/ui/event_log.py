"""Airflow's event log: who acted, on what, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from airflow.models.log import Log
from airflow.utils.session import create_session

from airflow_delayed.ui import security

PREFIX = "delayed_deliveries"


@contextmanager
def logged(action: str, user: security.User, told: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Write an entry ``delayed_deliveries.<action>`` before the work begins, and what came of it afterwards.

    Where it cannot be written, nothing is done.

    :param told: what is acted on; no content of messages.
    :return: to be filled with what came of it.
    """
    name = security.name_of(user)
    with create_session() as session:
        entry = Log(event=f"{PREFIX}.{action}", owner=name, owner_display_name=name, extra=json.dumps(dict(told)))
        session.add(entry)
        session.flush()
        number = entry.id
    outcome: dict[str, Any] = {}
    try:
        yield outcome
    except BaseException as error:
        outcome["failed"] = type(error).__name__
        raise
    finally:
        with create_session() as session:
            written = session.get(Log, number)
            if written is not None:
                written.extra = json.dumps({**told, **outcome})
