"""The app as Airflow mounts it: built by the first request, and closed if it cannot be built."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)


def _create() -> App:
    from airflow_delayed.compat import limits
    from airflow_delayed.ui.app import create

    for limit in limits():
        log.warning("%s", limit)
    return create()


class LazyApp:
    """An ASGI app that is made when it is first asked.

    If it cannot be made, for instance because this release of Airflow has its login elsewhere, each request is
    answered 503, and the reason is logged once.

    :param create: makes it.
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
    """Answer 503 to whatever is asked."""
    if scope["type"] != "http":
        return
    text = "The page of delayed deliveries could not be opened; the api-server's log says why"
    body = json.dumps({"error": {"code": "closed", "message": text}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
