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

from fastapi import APIRouter, FastAPI

from airflow_delayed import __version__
from airflow_delayed.ui import api_brokers, api_changes, api_connections, api_stores


def create() -> FastAPI:
    """Return the app."""
    app = FastAPI(title="Delayed deliveries", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    api = APIRouter(prefix="/api/v1")
    for module in (api_connections, api_stores, api_changes, api_brokers):
        api.include_router(module.router)
    app.include_router(api)
    return app
