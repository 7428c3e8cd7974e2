"""Who may do what. Airflow's own login and rights decide; nothing here is open.

============================ ============================================================
to open the page             logged in, and may see the pages of plugins
figures, lists, history      may read the connection; with ``[delayed] viewers = plugins``
                             no more than the page itself
bodies, header values        may read the connection
cancel, reschedule, redrive  may edit the connection
============================ ============================================================

Where Airflow has teams, the right to a connection of a team needs membership of it.

Airflow's import at the top is on purpose: without it there is no app, see :mod:`airflow_delayed.ui.lazy`.
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, ConnectionDetails
from airflow.api_fastapi.core_api.security import (
    GetUserDep,
    bearer_scheme,
    get_user,
    requires_access_connection,
    requires_access_view,
)
from airflow.configuration import conf
from airflow.models import Connection
from fastapi import Depends, HTTPException, Request
from starlette.concurrency import run_in_threadpool

from airflow_delayed import config
from airflow_delayed.ui import sites
from airflow_delayed.ui.faults import Refused
from airflow_delayed.ui.models import Rights

#: Who asks; a parameter of a route.
User = GetUserDep

#: May open the page.
views = Depends(requires_access_view(AccessView.PLUGINS))
#: May read the connection ``connection_id`` of the path.
reads = Depends(requires_access_connection("GET"))
#: May edit it.
edits = Depends(requires_access_connection("PUT"))

#: The longest request: a thousand ids, each character written as ``\\uXXXX`` twice.
MAX_REQUEST = 4_000_000


def may(method: Literal["GET", "PUT"], connection_id: str, user: User) -> bool:
    """Return whether a user may read or edit a connection: what the dependencies above ask."""
    team = Connection.get_team_name(connection_id) if conf.getboolean("core", "multi_team") else None
    details = ConnectionDetails(conn_id=connection_id, team_name=team)
    return get_auth_manager().is_authorized_connection(method=method, details=details, user=user)


async def _sees(connection_id: str, user: User) -> None:
    if config.viewers() == "connections" and not await run_in_threadpool(may, "GET", connection_id, user):
        raise HTTPException(403, "Forbidden")


#: May see figures and lists of that connection.
sees = Depends(_sees)


def rights(connection_id: str, user: User) -> Rights | None:
    """Return all that a user may do with a connection; None: not even see it."""
    found = Rights(bodies=may("GET", connection_id, user), act=may("PUT", connection_id, user))
    return found if found.bodies or config.viewers() == "plugins" else None


def name_of(user: User) -> str:
    """Return the name for audits and logs."""
    return str(user.get_name())


async def logged_in(request: Request) -> User:
    """Return who asks.

    :raises HTTPException: 401, nobody who is logged in.
    """
    return await get_user(request, None, await bearer_scheme(request))


def check_write(request: Request) -> None:
    """Refuse what another site could have a logged-in user's browser send, and what is too long.

    :raises HTTPException: 403, 411, 413, 415.
    """
    headers = request.headers
    own = (urlsplit(conf.get("api", "base_url", fallback="")).netloc, headers.get("host", ""))
    if problem := sites.problem(headers.get("sec-fetch-site"), headers.get("origin"), own):
        raise Refused(403, "cross_site", problem)
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "not_json", "send JSON, with the header Content-Type: application/json")
    # some servers pass on both, and the length then says nothing of what comes
    length = "" if "transfer-encoding" in headers else headers.get("content-length", "")
    if not length.isdecimal() or int(length) > MAX_REQUEST:
        status = 413 if length.isdecimal() else 411
        raise Refused(
            status,
            "invalid",
            f"send up to {MAX_REQUEST:,} bytes, with the header Content-Length and without Transfer-Encoding",
        )
