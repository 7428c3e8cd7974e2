"""A message as AMQP frames on one channel: publish, properties, body (AMQP 0-9-1, section 4.2.3)."""

from __future__ import annotations

import struct

from pika import BasicProperties, spec
from pika.frame import Method

from airflow_delayed.errors import LimitExceeded

_FRAME_HEADER = 7
_END = bytes((spec.FRAME_END,))
#: How many methods are kept: of a batch, many messages have the same destination and second.
_METHODS = 5000
_PROPERTIES = struct.Struct(">BHIHxxQ")
_PROPERTIES_HEAD = _PROPERTIES.size - _FRAME_HEADER
_BODY = struct.Struct(">BHI")


def properties_max(frame_max: int) -> int:
    """Return how many bytes a message's properties may take, for they have to fit into one frame.

    :param frame_max: the largest frame that was agreed upon, in bytes; 0 for any size.
    """
    return (frame_max or 1 << 31) - _FRAME_HEADER - len(_END) - _PROPERTIES_HEAD


class Frames:
    """Makes what pika's ``basic_publish`` would write, as one piece and with the method's frame made only once.

    :param channel: its number.
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
        taken = _PROPERTIES_HEAD + len(encoded)
        if len(encoded) > self._properties_max:
            raise LimitExceeded("headers", f"with them its properties take {taken:,} bytes, more than a frame")
        size = len(body)
        head = _PROPERTIES.pack(spec.FRAME_HEADER, self._channel, taken, BasicProperties.INDEX, size)
        pieces = [method, head, encoded, _END]
        for start in range(0, size, self._payload_max):
            part = body[start : start + self._payload_max]
            pieces += _BODY.pack(spec.FRAME_BODY, self._channel, len(part)), part, _END
        return b"".join(pieces)
