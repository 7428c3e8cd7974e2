"""The FastAPI app of the page and its API, mounted at ``/delayed-deliveries`` and built by the first request.

docs/operations/api.md has the paths. The four rights are those of the module ``security``: each path answers 401
without a login, and 403 without the right. The body of an error is ``{"error": {"code", "message"}}``, see ``errors``.

The content security policy of the page allows scripts, styles, images, fonts and requests from this path's origin
alone, nothing inline; images also as ``data:``. The page sends its requests relative to its own address,
``api/v1/...``. A task's link opens it with ``?store=&dag_id=&run_id=&task_id=&map_index=``.
"""

from __future__ import annotations

import mimetypes
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from airflow_delayed import __version__
from airflow_delayed.ui import api_brokers, api_live, api_pauses, api_stores, security, verdict
from airflow_delayed.ui.errors import ErrorResponse, answer_errors
from airflow_delayed.ui.hook_pool import HookPool
from airflow_delayed.ui.security import GuardedRoute

router = APIRouter(include_in_schema=False, route_class=GuardedRoute)

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

_FOLDER = Path(__file__).parent / "static"
_YEAR = "private, max-age=31536000, immutable"
#: For answers that may change at any time, such as a file whose address has no hash.
_NO_CACHE = "no-cache"


def create(pool: HookPool | None = None) -> FastAPI:
    """Return the app."""
    app = FastAPI(
        title="Delayed deliveries",
        description="What waits to be delivered, and what can be done about it.",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[security.opens],
        responses={"default": {"model": ErrorResponse, "description": "What went wrong, and what to do about it"}},
    )
    app.router.route_class = GuardedRoute
    app.state.hook_pool = pool or HookPool()
    api = APIRouter(prefix="/api/v1")
    for routes in (
        security.router,
        verdict.router,
        api_live.router,
        api_stores.router,
        api_stores.change_router,
        api_pauses.router,
        api_brokers.router,
    ):
        api.include_router(routes)
    app.include_router(api)
    app.include_router(router)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict[str, Any]:
        return app.openapi()

    @app.api_route("/{path:path}", methods=_METHODS, include_in_schema=False)
    async def nothing(path: str) -> None:
        raise HTTPException(404, "there is no such page")

    answer_errors(app)
    app.add_middleware(SecurityHeaders)
    return app


class SecurityHeaders:
    """Adds headers to each answer: the content security policy, and that browsers cache no answer of the API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                more = {**_HEADERS, b"cache-control": b"no-store"}
                message["headers"] = [*message["headers"], *(pair for pair in more.items() if pair[0] not in present)]
            await send(message)

        await self._app(scope, receive, with_headers)


@dataclass(frozen=True, slots=True)
class PageFiles:
    """The page's files, with a hash of them all; they are read once."""

    hash: str
    contents: dict[str, bytes]


@cache
def files() -> PageFiles:
    """Return the files of the folder ``static``."""
    contents = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.is_file()}
    whole = sha256()
    for name, content in contents.items():
        whole.update(f"{name} {len(content)} ".encode() + content)
    return PageFiles(whole.hexdigest()[:16], contents)


@router.get("/")
async def page(request: Request) -> Response:
    """Return the page; its files have their hash in their address."""
    static = files()
    html = static.contents["index.html"].replace(b'"static/', f'"static/{static.hash}/'.encode())
    return Response(html, media_type="text/html; charset=utf-8", headers={"Cache-Control": _NO_CACHE})


@router.get("/static/{name}")
async def file(name: str) -> Response:
    """Return a file as it is now."""
    return _file(name, _NO_CACHE)


@router.get("/static/{hash_}/{name}")
async def hashed_file(hash_: str, name: str) -> Response:
    """Return a file; its content never changes under an address with the present hash."""
    return _file(name, _YEAR if hash_ == files().hash else _NO_CACHE)


def _file(name: str, cache_control: str) -> Response:
    content = files().contents.get(name)
    if content is None or name == "index.html":
        raise HTTPException(404, "the page has no such file")
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    if name.endswith(".js"):
        kind = "text/javascript"  # which some systems do not know
    text = kind.startswith("text/") or kind == "image/svg+xml"
    media_type = f"{kind}; charset=utf-8" if text else kind
    return Response(content, media_type=media_type, headers={"Cache-Control": cache_control})
