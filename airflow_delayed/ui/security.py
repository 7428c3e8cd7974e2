"""The rights of users, the sites of requests, the connections that the page shows, and the event log of changes.

Airflow's own login and rights decide; nothing is open. There are four rights; the routes name them by these words.

========= ==================================== ============================================================
right     it allows                            a user has it who
========= ==================================== ============================================================
``opens`` to open the page                     is logged in, and may see the pages of plugins
``views`` figures, lists, chart                may read the connection; with ``[delayed] viewers = plugins``
                                               needs no more than the page itself
``reads`` bodies, header values                may read the connection
``edits`` cancel, restore, reschedule, retry,  may edit the connection; all but the last three of what a DAG
          pause, erase, redrive                sent: also who ``views`` and may edit that DAG
========= ==================================== ============================================================

Where Airflow has teams, the right to a connection of a team needs membership of it. The page calls no connection but
those of the section [delayed] of Airflow's configuration.

Airflow's import at the top is on purpose: without it there is no app, see :class:`airflow_delayed.ui.plugin.LazyApp`.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal
from urllib.parse import urlsplit

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, ConnectionDetails, DagDetails
from airflow.api_fastapi.core_api.security import (
    GetUserDep,
    bearer_scheme,
    get_user,
    requires_access_connection,
    requires_access_view,
)
from airflow.configuration import conf
from airflow.models import Connection
from airflow.models.dag import DagModel
from airflow.models.log import Log
from airflow.utils.session import create_session
from fastapi import APIRouter, Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import Field
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from airflow_delayed import __version__, config
from airflow_delayed.ui import errors
from airflow_delayed.ui.errors import RefusedRequest
from airflow_delayed.ui.models import ApiModel, ConnectionKind, ConnectionRights

log = logging.getLogger(__name__)

#: The user of a request; a parameter of a route.
User = GetUserDep
#: The rights to a connection that Airflow decides on.
Right = Literal["read", "edit"]

#: Airflow's method for each right to a connection.
_METHODS: Mapping[Right, Literal["GET", "PUT"]] = {"read": "GET", "edit": "PUT"}

#: The user may open the page.
opens = Depends(requires_access_view(AccessView.PLUGINS))
#: The user may read the connection ``connection_id`` of the path.
reads = Depends(requires_access_connection(_METHODS["read"]))
#: The user may edit it.
edits = Depends(requires_access_connection(_METHODS["edit"]))

#: The longest request: a thousand ids, each character written as ``\\uXXXX`` twice.
MAX_REQUEST = 4_000_000
#: The event log's entries begin with this.
EVENT_PREFIX = "delayed_deliveries"


def may(right: Right, connection_id: str, user: User) -> bool:
    """Return whether a user may read or edit a connection; ``reads`` and ``edits`` check the same for a route."""
    team = Connection.get_team_name(connection_id) if conf.getboolean("core", "multi_team") else None
    details = ConnectionDetails(conn_id=connection_id, team_name=team)
    return get_auth_manager().is_authorized_connection(method=_METHODS[right], details=details, user=user)


def may_dag(right: Right, dag_id: str, user: User) -> bool:
    """Return whether a user may read or edit a DAG.

    Nobody may if this Airflow has no such DAG: the team of a DAG that was deleted, or is another Airflow's on the same
    store, is unknown, and Airflow would decide as if it had none.
    """
    with create_session() as session:
        if session.scalar(select(DagModel.dag_id).where(DagModel.dag_id == dag_id)) is None:
            return False
    team = DagModel.get_team_name(dag_id) if conf.getboolean("core", "multi_team") else None
    details = DagDetails(id=dag_id, team_name=team)
    return get_auth_manager().is_authorized_dag(method=_METHODS[right], details=details, user=user)


def may_change(connection_id: str, user: User) -> Callable[[str | None], bool]:
    """Return whether a user may change messages of a connection by the DAG that sent them; None: no DAG did."""
    edits_all = may("edit", connection_id, user)

    @cache
    def of_dag(dag_id: str | None) -> bool:
        return edits_all or (dag_id is not None and may_dag("edit", dag_id, user))

    return of_dag


async def _check_views(connection_id: str, user: User) -> None:
    if config.viewers() == "connections" and not await run_in_threadpool(may, "read", connection_id, user):
        raise HTTPException(403, "Forbidden")


#: The user may view figures and lists of that connection.
views = Depends(_check_views)


def rights(connection_id: str, user: User) -> ConnectionRights | None:
    """Return a user's rights to a connection; None: the user may not even view it."""
    allowed = ConnectionRights(read=may("read", connection_id, user), edit=may("edit", connection_id, user))
    return allowed if allowed.read or config.viewers() == "plugins" else None


def name_of(user: User) -> str:
    """Return the name for audits and logs."""
    return str(user.get_name())


class GuardedRoute(APIRoute):
    """A route that reads nothing of a request before it knows its user and its site.

    FastAPI itself would read and parse a body before it looks at the login.
    """

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Return the function that answers a request."""
        answer = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            user = await get_user(request, None, await bearer_scheme(request))
            if request.method not in ("GET", "HEAD"):
                check_write(request)
            try:
                return await answer(request)
            except (HTTPException, RequestValidationError):
                raise
            except Exception as error:
                return await _error_response(request, user, error)

        return guarded


async def _error_response(request: Request, user: User, error: Exception) -> JSONResponse:
    known = errors.api_error(error)
    connection_id = request.path_params.get("connection_id", "")
    if known is None:
        log_unexpected(request.url.path, error)
        return errors.INTERNAL.response()
    if known.sensitive and not await run_in_threadpool(may, "read", connection_id, user):
        log.warning("The page of delayed deliveries could not ask a connection: %s", error)
        return known.without_details(connection_id).response()
    return known.response()


def log_unexpected(path: str, error: Exception) -> None:
    """Log where an error occurred, without its own text: a database's errors have the rows in them."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("The page of delayed deliveries failed at %s: %s\n%s", path, type(error).__name__, frames)


def check_write(request: Request) -> None:
    """Refuse a change that another site made a logged-in user's browser send, and a body that is too long."""
    headers = request.headers
    own = (urlsplit(conf.get("api", "base_url", fallback="")).netloc, headers.get("host", ""))
    if problem := csrf_problem(headers.get("sec-fetch-site"), headers.get("origin"), own):
        raise RefusedRequest(403, "cross_site", problem)
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RefusedRequest(415, "not_json", "send JSON, with the header Content-Type: application/json")
    # some servers pass on both, and the length then says nothing of what comes
    length = "" if "transfer-encoding" in headers else headers.get("content-length", "")
    if not length.isdecimal() or int(length) > MAX_REQUEST:
        status = 413 if length.isdecimal() else 411
        raise RefusedRequest(
            status,
            "invalid",
            f"send up to {MAX_REQUEST:,} bytes, with the header Content-Length and without Transfer-Encoding",
        )


def csrf_problem(fetch_site: str | None, origin: str | None, own: Sequence[str]) -> str | None:
    """Return why a change is refused; None: it comes from the page, or from a program that is no browser.

    :param fetch_site: the header Sec-Fetch-Site, which a page cannot forge
        (https://www.w3.org/TR/fetch-metadata/#sec-fetch-site-header).
    :param origin: the header Origin, which browsers send with each POST.
    :param own: names and ports at which this server is reached.
    """
    if fetch_site is not None:
        # a proxy may have changed our name, so the origin is not compared then
        return None if fetch_site == "same-origin" else "requests that change something are refused from other sites"
    if origin is not None and (not urlsplit(origin).netloc or urlsplit(origin).netloc not in own):
        return "the header Origin names another site than this one; set [api] base_url to the address of Airflow"
    return None


@contextmanager
def logged(action: str, user: User, details: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Write an entry ``delayed_deliveries.<action>`` into Airflow's event log before the work, and its outcome after.

    Where the entry cannot be written, nothing is done.

    :param details: the selection that is acted on; no content of messages.
    :return: the outcome, for the caller to fill.
    """
    name = name_of(user)
    with create_session() as session:
        entry = Log(
            event=f"{EVENT_PREFIX}.{action}", owner=name, owner_display_name=name, extra=json.dumps({**details})
        )
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
                written.extra = json.dumps({**details, **outcome})


router = APIRouter(tags=["connections"], route_class=GuardedRoute)


class ConnectionResponse(ApiModel):
    """One connection of the section [delayed] of Airflow's configuration."""

    connection_id: str
    kind: ConnectionKind
    queue: str | None = Field(default=None, description="Of SQS: the destination. One entry for each")
    may: ConnectionRights


class ConnectionCollection(ApiModel):
    """All that the page shows, in the order of the configuration."""

    user: str
    version: str
    body_limit: int = Field(description="Bytes of a body that are shown at most")
    connections: list[ConnectionResponse]
    hidden: bool = Field(description="Some are not shown, because the user may not read them")


@dataclass(frozen=True, slots=True)
class PageConnection:
    """One connection, with the destination of SQS."""

    connection_id: str
    kind: ConnectionKind
    queue: str | None = None


def configured() -> list[PageConnection]:
    """Return all connections of the configuration, in that order."""
    stores = [PageConnection(conn_id, "store") for conn_id in config.page_stores()]
    brokers = [PageConnection(conn_id, "rabbitmq") for conn_id in config.page_rabbitmq()]
    return [*stores, *brokers, *(PageConnection(conn_id, "sqs", queue) for conn_id, queue in config.page_sqs())]


def _check(connection: PageConnection, option: str) -> None:
    if connection not in configured():
        raise HTTPException(404, f"not named by {option} of Airflow's configuration, section [{config.SECTION}]")


async def _store(connection_id: str) -> None:
    _check(PageConnection(connection_id, "store"), "page_stores")


async def _rabbitmq(connection_id: str) -> None:
    _check(PageConnection(connection_id, "rabbitmq"), "page_rabbitmq")


async def _sqs(connection_id: str, queue: str) -> None:
    _check(PageConnection(connection_id, "sqs", queue), "page_sqs")


#: The connection of the path is shown on the page; else the answer is 404.
is_store, is_rabbitmq, is_sqs = Depends(_store), Depends(_rabbitmq), Depends(_sqs)


@router.get("/connections")
def connections(user: User) -> ConnectionCollection:
    """Return the connections of Airflow's configuration, section [delayed], that the user may see."""
    # no broker and no database is called
    listed = configured()
    allowed = {name: rights(name, user) for name in {one.connection_id for one in listed}}
    return ConnectionCollection(
        user=name_of(user),
        version=__version__,
        body_limit=config.page_body_limit(),
        connections=[
            ConnectionResponse(**asdict(one), may=may)
            for one in listed
            if (may := allowed[one.connection_id]) is not None
        ],
        hidden=any(may is None for may in allowed.values()),
    )
