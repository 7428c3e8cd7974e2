"""pika's loop, with what is written at one time sent as one: pika hands each frame to the system by itself."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

from pika.adapters.select_connection import IOLoop

#: Linux's option that holds back incomplete packets; None elsewhere, where every frame is a packet of its own.
_CORK: int | None = getattr(socket, "TCP_CORK", None)


class CorkedLoop(IOLoop):
    """A loop that corks a socket while its writer runs, and can hang up.

    Three small packets a message, each with a wake-up of the broker, cost more than all else that a client does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._open: set[int] = set()

    def hang_up(self) -> None:
        """End the connection without the broker's part in it; pika then finds it closed, and closes its socket."""
        for fd in self._open:
            with contextlib.suppress(OSError), _borrowed(fd) as found:
                found.shutdown(socket.SHUT_RDWR)

    def add_handler(self, fd: int, handler: Callable[[int, int], None], events: int) -> None:
        """Have ``handler(fd, events)`` called on these events; its writes go out together when it returns."""

        def corked(fd: int, events: int) -> None:
            if not events & self.WRITE:
                handler(fd, events)
                return
            _cork(fd, 1)
            try:
                handler(fd, events)
            finally:
                _cork(fd, 0)

        self._open.add(fd)
        super().add_handler(fd, corked if _CORK is not None else handler, events)

    def remove_handler(self, fd: int) -> None:
        """Watch it no longer."""
        self._open.discard(fd)
        super().remove_handler(fd)


def _cork(fd: int, value: int) -> None:
    # it may be closed by now, or no TCP socket at all
    with contextlib.suppress(OSError), _borrowed(fd) as found:
        found.setsockopt(socket.IPPROTO_TCP, _CORK or 0, value)


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    found = socket.socket(fileno=fd)
    try:
        yield found
    finally:
        found.detach()
