"""The page in Airflow's navigation.

Every component of Airflow imports this module, so the app itself is imported and built by the first request. If it
cannot be built, each request is answered 503.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from airflow.configuration import conf
from airflow.plugins_manager import AirflowPlugin

from airflow_delayed.links import ROUTE, base_path

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)

NAME = "Delayed deliveries"
#: The navigation cuts longer names.
NAV_NAME = "Delayed"


def views() -> list[dict[str, Any]]:
    """Return the page's place in Airflow's navigation."""
    top = _top()
    icons = {"icon": f"{top}static/icon.svg", "icon_dark_mode": f"{top}static/icon-dark.svg"}
    return [{"name": NAV_NAME, "href": top, "destination": "nav", "url_route": ROUTE, **icons}]


def _top() -> str:
    # Airflow mounts apps below the path of its own address
    return f"{base_path(conf.get('api', 'base_url', fallback=''))}/{ROUTE}/"


def _create() -> App:
    from airflow_delayed.compat import limits
    from airflow_delayed.ui.app import create

    for limit in limits():
        log.warning("%s", limit)
    return create()


class LazyApp:
    """An ASGI app that is built by its first request.

    If it cannot be built, for instance because this release of Airflow has its login elsewhere, each request is
    answered 503, and the reason is logged once.
    """

    def __init__(self, create: Callable[[], App] = _create) -> None:
        self._create = create
        self._app: App | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        if self._app is None:
            try:
                self._app = self._create()
            except Exception as error:
                frames = "".join(traceback.format_tb(error.__traceback__))
                log.error(
                    "The page of delayed deliveries stays closed, because it could not be made: %s: %s\n%s",
                    type(error).__name__,
                    error,
                    frames,
                )
                self._app = closed
        await self._app(scope, receive, send)


async def closed(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer each request 503."""
    if scope["type"] != "http":
        return
    text = "The page of delayed deliveries could not be opened; the api-server's log says why"
    body = json.dumps({"error": {"code": "closed", "message": text}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class DelayedPlugin(AirflowPlugin):
    """The plugin that Airflow loads by the entry point and by the provider's metadata."""

    name = "delayed_deliveries"
    fastapi_apps = [{"app": LazyApp(), "url_prefix": f"/{ROUTE}", "name": NAME}]
    external_views = views()
