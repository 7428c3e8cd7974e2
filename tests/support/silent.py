"""A server that nobody hears of."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Thread


class Silent:
    """A database that takes connections and never answers."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        #: That it has taken.
        self.connections: list[socket.socket] = []
        Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        with suppress(OSError):
            while True:
                self.connections.append(self._server.accept()[0])

    def close(self) -> None:
        # the thread would wait on in a socket that is only closed
        self._server.shutdown(socket.SHUT_RDWR)
        for one in (self._server, *self.connections):
            one.close()
