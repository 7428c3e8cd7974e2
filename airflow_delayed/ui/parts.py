"""What the routes have in common."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from airflow_delayed.ui import configured, security
from airflow_delayed.ui.asking import Asking


async def _asking(request: Request) -> Asking:
    found: Asking = request.app.state.asking
    return found


AskingDep = Annotated[Asking, Depends(_asking)]


async def _store(connection_id: str) -> None:
    configured.check(connection_id, "store")


async def _rabbitmq(connection_id: str) -> None:
    configured.check(connection_id, "rabbitmq")


async def _sqs(connection_id: str, queue: str) -> None:
    configured.check(connection_id, "sqs", queue)


#: The connection of the path is one that the page shows.
is_store, is_rabbitmq, is_sqs = Depends(_store), Depends(_rabbitmq), Depends(_sqs)
#: Who asks.
User = security.User
