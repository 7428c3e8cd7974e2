"""The FastAPI app of the page and its API, mounted at ``/delayed-deliveries``. Built when it is first asked.

============================================ ========= =================================================================
``GET /``                                    viewer    ``static/index.html``, in which ``static/`` before a file's name
                                                       becomes ``static/<hash of all files>/``
``GET /static/<hash>/<file>``                viewer    a file of the folder ``static``, to be kept for a year
``GET /api/v1/connections``                  viewer    what is configured, and what the user may do
``GET /api/v1/stores/{id}/summary`` ...      viewer    see ``api_stores``
``GET /api/v1/stores/{id}/body``             reads     needs the right to read the connection
``POST /api/v1/stores/{id}/cancel`` ...      edits     see ``api_changes``; the right to edit the connection
``GET /api/v1/rabbitmq|sqs/.../summary``     viewer    see ``api_brokers``
``POST /api/v1/rabbitmq|sqs/.../redrive``    edits
``GET /openapi.json``                        viewer    all of it for programs
============================================ ========= =================================================================

Without login each answers 401, and below the right 403. Each fault's body is ``{"error": {"code", "message"}}``: 400
invalid input, 403 also for what comes from another site, 404 for what is not configured, 409 tables that are not
ready, 415 for what is no JSON, 503 a database or broker that is away or busy, 504 one that took over five seconds.

The content security policy of the page allows scripts, styles, images, fonts and requests from this path's origin
alone, nothing inline; images also as ``data:``. The page asks relative to its own address, ``api/v1/...``. It is
opened with ``?dag_id=&run_id=&task_id=&map_index=`` (those that are known) from a DAG, a run, a task and a task
instance.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from airflow_delayed import __version__
from airflow_delayed.ui import api_brokers, api_changes, api_connections, api_stores, pages, security
from airflow_delayed.ui.asking import Asking
from airflow_delayed.ui.models import FaultAnswer
from airflow_delayed.ui.route import GuardedRoute, answer_faults

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_HEADERS = {
    b"content-security-policy": _POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",
}


def create(asking: Asking | None = None) -> FastAPI:
    """Return the app.

    :param asking: asks the connections.
    """
    app = FastAPI(
        title="Delayed deliveries",
        description="What waits to be delivered, and what can be done about it.",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[security.views],
        responses={"default": {"model": FaultAnswer, "description": "What went wrong, and what to do about it"}},
    )
    app.router.route_class = GuardedRoute
    app.state.asking = asking or Asking()
    api = APIRouter(prefix="/api/v1")
    for module in (api_connections, api_stores, api_changes, api_brokers):
        api.include_router(module.router)
    app.include_router(api)
    app.include_router(pages.router)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict[str, Any]:
        """Describe the API to programs."""
        return app.openapi()

    @app.api_route("/{path:path}", methods=_METHODS, include_in_schema=False)
    async def nothing(path: str) -> None:
        """Answer what is not there, to those who are logged in."""
        raise HTTPException(404, "there is no such page")

    answer_faults(app)
    app.add_middleware(Headers)
    return app


class Headers:
    """Puts headers on each answer: what the page may load, and that answers of the API are not kept."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                more = {**_HEADERS, b"cache-control": b"no-store"}
                message["headers"] = [*message["headers"], *(pair for pair in more.items() if pair[0] not in given)]
            await send(message)

        await self._app(scope, receive, with_headers)
