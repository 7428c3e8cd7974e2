"""The least a client can do: frames made once, written in a window of unconfirmed messages, confirms counted."""

from __future__ import annotations

import socket

from pika import BasicProperties, URLParameters, frame, spec

WINDOW = 1000
#: Messages that are written at once.
CHUNK = 100


class RawClient:
    """One connection with one channel in confirm mode."""

    def __init__(self, parameters: URLParameters) -> None:
        self._socket = socket.create_connection((parameters.host, parameters.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        login = parameters.credentials
        self._socket.sendall(b"AMQP\x00\x00\x09\x01")
        self._next(spec.Connection.Start)
        response = f"\0{login.username}\0{login.password}"
        self._send(0, spec.Connection.StartOk({}, "PLAIN", response, "en_US"))
        tune = self._next(spec.Connection.Tune)
        self._send(0, spec.Connection.TuneOk(tune.channel_max, tune.frame_max, 0))
        self._send(0, spec.Connection.Open(parameters.virtual_host))
        self._next(spec.Connection.OpenOk)
        self._send(1, spec.Channel.Open())
        self._next(spec.Channel.OpenOk)
        self._send(1, spec.Confirm.Select())
        self._next(spec.Confirm.SelectOk)

    def publish(self, count: int, exchange: str, key: str, body: bytes, properties: BasicProperties) -> None:
        """Publish one message so many times, mandatory; return when all are confirmed.

        :raises RuntimeError: one was returned or refused.
        """
        method = spec.Basic.Publish(exchange=exchange, routing_key=key, mandatory=True)
        parts = (frame.Method(1, method), frame.Header(1, len(body), properties), frame.Body(1, body))
        message = b"".join(part.marshal() for part in parts)
        chunk = message * CHUNK
        sent = confirmed = 0
        while confirmed < count:
            while sent < count and sent - confirmed <= WINDOW - CHUNK:
                some = min(CHUNK, count - sent)
                self._socket.sendall(chunk if some == CHUNK else message * some)
                sent += some
            confirmed = max(confirmed, self._confirmed())

    def close(self) -> None:
        """Close the connection."""
        self._send(0, spec.Connection.Close(200, "", 0, 0))
        self._socket.close()

    def _confirmed(self) -> int:
        """Return the highest tag of what has arrived; a broker's confirms of one channel may skip, but not fall."""
        tag = 0
        data = self._received + self._socket.recv(1 << 16)
        position = 0
        while len(data) - position >= 8:
            size = int.from_bytes(data[position + 3 : position + 7], "big")
            if len(data) - position < size + 8:
                break
            if data[position + 7 : position + 11] != b"\x00\x3c\x00\x50":
                raise RuntimeError("the broker sent something that is no confirm")
            tag = int.from_bytes(data[position + 11 : position + 19], "big")
            position += size + 8
        self._received = data[position:]
        return tag

    def _send(self, channel: int, method: object) -> None:
        self._socket.sendall(frame.Method(channel, method).marshal())

    def _next(self, kind: type) -> object:
        while True:
            used, found = frame.decode_frame(self._received)
            self._received = self._received[used:]
            if found is None:
                data = self._socket.recv(1 << 16)
                if not data:
                    raise RuntimeError(f"the broker closed the connection instead of {kind.__name__}")
                self._received += data
            elif isinstance(found, frame.Method):
                if not isinstance(found.method, kind):
                    raise RuntimeError(f"the broker sent {found.method}")
                return found.method
