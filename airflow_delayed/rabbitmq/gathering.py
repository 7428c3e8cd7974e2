"""pika's loop, with what is written at one time sent as one: pika hands each frame to the system by itself."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pika.adapters.select_connection import IOLoop
from pika.adapters.utils.nbio_interface import AbstractStreamProtocol, AbstractStreamTransport
from pika.adapters.utils.selector_ioloop_adapter import SelectorIOServicesAdapter

if TYPE_CHECKING:
    from pika.adapters.utils.nbio_interface import AbstractIOReference

#: Bytes that are gathered at most before they go on; more would be copied again each time the system takes a part.
_ENOUGH = 1 << 16


class _Loop(IOLoop):
    """A loop that knows whether one of its handlers runs."""

    def __init__(self) -> None:
        super().__init__()
        self.transport: _Transport | None = None

    def add_handler(self, fd: int, handler: Callable[[int, int], None], events: int) -> None:
        """Have ``handler(fd, events)`` called on these events; its writes go out together when it returns."""

        def gathered(fd: int, events: int) -> None:
            transport = self.transport
            if transport is None:
                handler(fd, events)
                return
            transport.gathers = True
            try:
                handler(fd, events)
            finally:
                transport.gathers = False
                transport.flush()

        super().add_handler(fd, gathered, events)


class _Transport(AbstractStreamTransport):
    """Another transport, which gets what is written while ``gathers`` is set in one piece."""

    def __init__(self, inner: AbstractStreamTransport) -> None:
        self.gathers = False
        self._inner = inner
        self._pieces: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        """Write, or keep it until there is more."""
        self._pieces.append(data)
        self._size += len(data)
        if not self.gathers or self._size >= _ENOUGH:
            self.flush()

    def flush(self) -> None:
        """Write what was gathered."""
        if self._pieces:
            data = b"".join(self._pieces)
            self._pieces.clear()
            self._size = 0
            self._inner.write(data)

    def abort(self) -> None:
        """Close at once; what was not sent is lost."""
        self._inner.abort()

    def get_protocol(self) -> AbstractStreamProtocol:
        """Return who receives."""
        return self._inner.get_protocol()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes are still to be sent."""
        return self._size + self._inner.get_write_buffer_size()


class _Protocol(AbstractStreamProtocol):
    """Another protocol, which gets our transport."""

    def __init__(self, inner: AbstractStreamProtocol, loop: _Loop) -> None:
        self.inner = inner
        self.transport: _Transport
        self._loop = loop

    def connection_made(self, transport: AbstractStreamTransport) -> None:
        self.transport = self._loop.transport = _Transport(transport)
        self.inner.connection_made(self.transport)

    def connection_lost(self, error: BaseException | None) -> None:
        self._loop.transport = None
        self.inner.connection_lost(error)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def data_received(self, data: bytes) -> None:
        self.inner.data_received(data)


class GatheringServices(SelectorIOServicesAdapter):
    """pika's own I/O services, over a loop and a transport that gather what a handler writes.

    Three small packets a message, each with a wake-up of the broker, cost more than all else that a client does.
    """

    def __init__(self) -> None:
        self._gathering = _Loop()
        # what it is generic in, pika's own loop does not say
        loop: Any = self._gathering
        super().__init__(loop)

    def write(self, data: bytes) -> None:
        """Write whole frames among pika's own; nothing if the connection is lost, which pika tells then."""
        if self._gathering.transport is not None:
            self._gathering.transport.write(data)

    def hang_up(self) -> None:
        """End the connection without the broker's part in it; pika then finds it closed."""
        if self._gathering.transport is not None:
            self._gathering.transport.abort()

    def create_streaming_connection(
        self,
        protocol_factory: Callable[[], AbstractStreamProtocol],
        sock: socket.socket,
        on_done: Callable[[Any], None],
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
    ) -> AbstractIOReference:
        """Make a transport and its protocol as pika does; hand out ours before them."""
        made: list[_Protocol] = []

        def factory() -> AbstractStreamProtocol:
            made.append(_Protocol(protocol_factory(), self._gathering))
            return made[-1]

        def done(result: object) -> None:
            on_done(result if isinstance(result, BaseException) else (made[-1].transport, made[-1].inner))

        return super().create_streaming_connection(factory, sock, done, ssl_context, server_hostname)
