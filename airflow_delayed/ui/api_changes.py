"""Changing messages of a store; needs the right to edit the connection.

A POST with ``Content-Type: application/json`` from the page itself, or from a program. By a filter, one call works on
some thousand messages and answers with ``next`` if there are more.
"""

from __future__ import annotations

from fastapi import APIRouter

from airflow_delayed.ui.models import Changed
from airflow_delayed.ui.requests import Change, Rescheduling

router = APIRouter(prefix="/stores/{connection_id}", tags=["changes"])


@router.post("/cancel")
def cancel(connection_id: str, change: Change) -> Changed:
    """Remove messages, failed ones too, and remember their ids as cancelled."""
    raise NotImplementedError


@router.post("/reschedule")
def reschedule(connection_id: str, change: Rescheduling) -> Changed:
    """Give messages that wait another due time."""
    raise NotImplementedError


@router.post("/retry")
def retry(connection_id: str, change: Change) -> Changed:
    """Let failed messages wait again."""
    raise NotImplementedError


@router.post("/erase")
def erase(connection_id: str, change: Change) -> Changed:
    """Remove messages and all that is known of them but the id."""
    raise NotImplementedError
