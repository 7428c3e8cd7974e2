"""A route of the API: first who asks, then from where, then what; and each fault as the same small JSON."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from airflow_delayed.ui import faults, security

log = logging.getLogger(__name__)


class GuardedRoute(APIRoute):
    """A route that reads nothing of a request before it knows who asks, and from where.

    FastAPI itself would read and parse a body before it looks at the login.
    """

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Return what answers a request."""
        answer = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            user = await security.logged_in(request)
            if request.method not in ("GET", "HEAD"):
                security.check_write(request)
            try:
                return await answer(request)
            except (HTTPException, RequestValidationError):
                raise
            except Exception as error:
                return await _answer(request, user, error)

        return guarded


async def _answer(request: Request, user: security.User, error: Exception) -> JSONResponse:
    found = faults.fault_of(error)
    connection_id = request.path_params.get("connection_id", "")
    if found is None:
        # where it failed, without the error's own text: a database's errors have the rows in them
        frames = "".join(traceback.format_tb(error.__traceback__))
        log.error("The page of delayed deliveries failed at %s: %s\n%s", request.url.path, type(error).__name__, frames)
        found = faults.UNKNOWN
    elif found.tells_where and not await run_in_threadpool(security.may, "GET", connection_id, user):
        log.warning("The page of delayed deliveries could not ask a connection: %s", error)
        found = found.without_details(connection_id)
    return faults.answer(found)


def answer_faults(app: FastAPI) -> None:
    """Have an app answer what FastAPI and Airflow refuse as it answers all other faults."""

    async def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return faults.answer(faults.refusal(error), headers=error.headers)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return faults.answer(faults.invalid(error))

    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, invalid)
