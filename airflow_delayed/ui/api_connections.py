"""What is configured, and what this user may do with it. No broker and no database is asked."""

from __future__ import annotations

from fastapi import APIRouter

from airflow_delayed.ui.models import Connections

router = APIRouter(tags=["connections"])


@router.get("/connections")
def connections() -> Connections:
    """Return the connections of Airflow's configuration, section [delayed]."""
    raise NotImplementedError
