"""What is configured, and what this user may do with it. No broker and no database is asked."""

from __future__ import annotations

from fastapi import APIRouter

from airflow_delayed import __version__, config
from airflow_delayed.ui import configured, security
from airflow_delayed.ui.models import Connections, ConnectionShown
from airflow_delayed.ui.route import GuardedRoute

router = APIRouter(tags=["connections"], route_class=GuardedRoute)


@router.get("/connections")
def connections(user: security.User) -> Connections:
    """Return the connections of Airflow's configuration, section [delayed], that the user may see."""
    shown = configured.shown()
    rights = {name: security.rights(name, user) for name in {one.connection_id for one in shown}}
    return Connections(
        user=security.name_of(user),
        version=__version__,
        body_limit=config.page_body_limit(),
        connections=[
            ConnectionShown(connection_id=one.connection_id, kind=one.kind, queue=one.queue, may=may)
            for one in shown
            if (may := rights[one.connection_id]) is not None
        ],
        hidden=any(may is None for may in rights.values()),
    )
