"""Messages on the wire: the AMQP frames of a message, buffered writes, and connections that keep properties encoded.

A message is three frames on its channel: publish, properties, body (AMQP 0-9-1, section 4.2.3). pika hands each frame
to the system by itself. Three small packets a message, each of which wakes the broker, cost more than all else that a
client does. Measured: pika's own ``basic_publish`` costs 55 us of client CPU a message instead of 22, and sends 70 % of
the messages a second.

So this file writes past pika's channel, and relies on pika's internals. Where they have moved, a session publishes with
``basic_publish``.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pika import BasicProperties, spec
from pika.adapters.select_connection import SelectConnection
from pika.frame import Header, Method

from airflow_delayed.errors import LimitExceeded
from airflow_delayed.rabbitmq.properties import ReceivedProperties

try:
    from pika.adapters.select_connection import IOLoop
    from pika.adapters.utils.nbio_interface import AbstractStreamProtocol, AbstractStreamTransport
    from pika.adapters.utils.selector_ioloop_adapter import SelectorIOServicesAdapter
except ImportError:
    _PIKA_AS_KNOWN = False
    # only so that the classes below can be made; nothing uses them then
    IOLoop = AbstractStreamProtocol = AbstractStreamTransport = SelectorIOServicesAdapter = object  # type: ignore[misc, assignment]
else:
    _PIKA_AS_KNOWN = True

if TYPE_CHECKING:
    from pika.adapters.utils.nbio_interface import AbstractIOReference
    from pika.channel import Channel

#: Writes a mandatory message: exchange, routing key, body, properties.
WriteMessage = Callable[[str, str, bytes, BasicProperties], None]

_FRAME_HEADER = 7
_END = bytes((spec.FRAME_END,))
#: How many method frames are kept: many messages of a batch have the same destination and second.
_METHODS = 5000
_PROPERTIES = struct.Struct(">BHIHxxQ")
_PROPERTIES_HEAD = _PROPERTIES.size - _FRAME_HEADER
_BODY = struct.Struct(">BHI")
#: The start of every frame, and what follows in a header frame before the properties.
_FRAME_START, _HEADER_START = struct.Struct(">BHI"), struct.Struct(">HHQ")


def properties_max(frame_max: int) -> int:
    """Return how many bytes a message's properties may take, for they have to fit into one frame.

    :param frame_max: the largest frame that was agreed upon, in bytes; 0 for any size.
    """
    return (frame_max or 1 << 31) - _FRAME_HEADER - len(_END) - _PROPERTIES_HEAD


class Frames:
    """Makes what pika's ``basic_publish`` would write, as one piece; each method's frame is made only once.

    :param channel: the channel's number.
    :param frame_max: the largest frame that was agreed upon, in bytes; 0 for any size.
    """

    def __init__(self, channel: int, frame_max: int) -> None:
        self._channel = channel
        self._payload_max = (frame_max or 1 << 31) - _FRAME_HEADER - len(_END)
        self._properties_max = properties_max(frame_max)
        self._methods: dict[tuple[str, str], bytes] = {}

    def message(self, exchange: str, key: str, body: bytes, properties: BasicProperties) -> bytes:
        """Return the frames of a mandatory message.

        :raises LimitExceeded: its properties are larger than a frame, for which the broker would close the connection.
        """
        method = self._methods.get((exchange, key))
        if method is None:
            if len(self._methods) >= _METHODS:
                self._methods.clear()
            publish = spec.Basic.Publish(exchange=exchange, routing_key=key, mandatory=True)
            method = self._methods[exchange, key] = Method(self._channel, publish).marshal()
        encoded = b"".join(properties.encode())
        if len(encoded) > self._properties_max:
            raise _too_large(len(encoded))
        size = len(body)
        head = _PROPERTIES.pack(
            spec.FRAME_HEADER, self._channel, _PROPERTIES_HEAD + len(encoded), BasicProperties.INDEX, size
        )
        pieces = [method, head, encoded, _END]
        for start in range(0, size, self._payload_max):
            part = body[start : start + self._payload_max]
            pieces += _BODY.pack(spec.FRAME_BODY, self._channel, len(part)), part, _END
        return b"".join(pieces)


#: Bytes that are buffered at most; more would be copied again each time the system takes a part.
_BUFFER_BYTES = 1 << 16


def _too_large(size: int) -> LimitExceeded:
    taken = _PROPERTIES_HEAD + size
    return LimitExceeded("headers", f"with them its properties take {taken:,} bytes, more than a frame")


class _BufferingLoop(IOLoop):
    """A loop that knows whether one of its handlers runs."""

    def __init__(self) -> None:
        super().__init__()
        self.transport: _BufferingTransport | None = None

    def add_handler(self, fd: int, handler: Callable[[int, int], None], events: int) -> None:
        """Have ``handler(fd, events)`` called on these events; its writes go out together when it returns."""

        def buffered(fd: int, events: int) -> None:
            transport = self.transport
            if transport is None:
                handler(fd, events)
                return
            transport.buffers = True
            try:
                handler(fd, events)
            finally:
                transport.buffers = False
                transport.flush()

        super().add_handler(fd, buffered, events)


class _BufferingTransport(AbstractStreamTransport):
    """Passes what is written to another transport, in one piece while ``buffers`` is set."""

    def __init__(self, inner: AbstractStreamTransport) -> None:
        self.buffers = False
        self._inner = inner
        self._pieces: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        """Write the data, or keep it until there is more."""
        self._pieces.append(data)
        self._size += len(data)
        if not self.buffers or self._size >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was kept."""
        if self._pieces:
            data = b"".join(self._pieces)
            self._pieces.clear()
            self._size = 0
            self._inner.write(data)

    def abort(self) -> None:
        """Close at once; what was not sent is lost."""
        self._inner.abort()

    def get_protocol(self) -> AbstractStreamProtocol:
        """Return the protocol, which receives."""
        return self._inner.get_protocol()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes are still to be sent."""
        return self._size + self._inner.get_write_buffer_size()


class _BufferingProtocol(AbstractStreamProtocol):
    """Passes the buffering transport to another protocol."""

    def __init__(self, inner: AbstractStreamProtocol, loop: _BufferingLoop) -> None:
        self.inner = inner
        self.transport: _BufferingTransport
        self._loop = loop

    def connection_made(self, transport: AbstractStreamTransport) -> None:
        self.transport = self._loop.transport = _BufferingTransport(transport)
        self.inner.connection_made(self.transport)

    def connection_lost(self, error: BaseException | None) -> None:
        self._loop.transport = None
        self.inner.connection_lost(error)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def data_received(self, data: bytes) -> None:
        self.inner.data_received(data)


class BufferedServices(SelectorIOServicesAdapter):
    """pika's own I/O services, over a loop and a transport that send together what a handler writes."""

    def __init__(self) -> None:
        self._buffering_loop = _BufferingLoop()
        # pika's own loop does not name the type that it is generic in
        loop: Any = self._buffering_loop
        super().__init__(loop)

    def write(self, data: bytes) -> None:
        """Write whole frames among pika's own; nothing if the connection is lost, which pika reports then."""
        if self._buffering_loop.transport is not None:
            self._buffering_loop.transport.write(data)

    def hang_up(self) -> None:
        """End the connection without waiting for the broker; pika then sees that it is closed."""
        if self._buffering_loop.transport is not None:
            self._buffering_loop.transport.abort()

    @property
    def connected(self) -> bool:
        """Whether the connection's transport is the buffering one."""
        return self._buffering_loop.transport is not None

    def create_streaming_connection(
        self,
        protocol_factory: Callable[[], AbstractStreamProtocol],
        sock: socket.socket,
        on_done: Callable[[Any], None],
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
    ) -> AbstractIOReference:
        """Make a transport and its protocol as pika does, and put the buffering ones before them."""
        made: list[_BufferingProtocol] = []

        def factory() -> AbstractStreamProtocol:
            made.append(_BufferingProtocol(protocol_factory(), self._buffering_loop))
            return made[-1]

        def done(result: object) -> None:
            on_done(result if isinstance(result, BaseException) else (made[-1].transport, made[-1].inner))

        return super().create_streaming_connection(factory, sock, done, ssl_context, server_hostname)


def buffered_services() -> BufferedServices | None:
    """Return I/O services for a connection; None, for pika's own, where pika's internals have moved."""
    return BufferedServices() if _PIKA_AS_KNOWN else None


def message_writer(channel: Channel, services: BufferedServices | None, frame_max: int) -> WriteMessage:
    """Return a function that writes messages on an open channel, fast if the services are those of its connection.

    :param frame_max: the largest frame that was agreed upon, in bytes; 0 for any size.
    """
    if services is None or not services.connected:
        return _published_by_pika(channel, properties_max(frame_max))
    frames, write = Frames(channel.channel_number, frame_max), services.write

    def write_frames(exchange: str, key: str, body: bytes, properties: BasicProperties) -> None:
        write(frames.message(exchange, key, body, properties))

    return write_frames


def _published_by_pika(channel: Channel, most: int) -> WriteMessage:
    def publish(exchange: str, key: str, body: bytes, properties: BasicProperties) -> None:
        if (size := sum(map(len, properties.encode()))) > most:
            raise _too_large(size)
        channel.basic_publish(exchange, key, body, properties, mandatory=True)

    return publish


class DecodingSelectConnection(SelectConnection):
    """pika's connection, also inside of its blocking one, whose header frames have :class:`ReceivedProperties`."""

    _frame_buffer: bytes

    def _read_frame(self) -> Any:
        data = self._frame_buffer
        if data[:1] == bytes((spec.FRAME_HEADER,)) and len(data) >= _FRAME_START.size + _HEADER_START.size:
            _, channel, size = _FRAME_START.unpack_from(data)
            end = _FRAME_START.size + size
            if len(data) > end and data[end] == spec.FRAME_END and size >= _HEADER_START.size:
                _, _, body_size = _HEADER_START.unpack_from(data, _FRAME_START.size)
                return end + 1, Header(
                    channel, body_size, ReceivedProperties(data[_FRAME_START.size + _HEADER_START.size : end])
                )
        # other frames, an incomplete one, and bytes that are no frame
        pika: Any = super()
        return pika._read_frame()
