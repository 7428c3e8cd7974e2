"""Looking into a store. Everyone who may see plugins' pages sees figures, lists and the names of headers."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from airflow_delayed.ui.models import Body, MessageDetail, Messages, StoreSummary
from airflow_delayed.ui.requests import Listing, MessageId

router = APIRouter(prefix="/stores/{connection_id}", tags=["stores"])


@router.get("/summary")
def summary(connection_id: str) -> StoreSummary:
    """Return how the store stands; the figures may be some seconds old."""
    raise NotImplementedError


@router.get("/messages")
def messages(connection_id: str, query: Annotated[Listing, Query()]) -> Messages:
    """Return one page of messages, failed ones too."""
    raise NotImplementedError


@router.get("/message")
def message(connection_id: str, id: Annotated[MessageId, Query()]) -> MessageDetail:
    """Return all that is known of an id; header values only with the right to read the connection."""
    raise NotImplementedError


@router.get("/body")
def body(connection_id: str, id: Annotated[MessageId, Query()]) -> Body:
    """Return a body; needs the right to read the connection."""
    raise NotImplementedError
