from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import BasicProperties, frame, spec

from airflow_delayed.errors import LimitExceeded
from airflow_delayed.rabbitmq.wire import Frames

names = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@given(
    st.lists(st.tuples(names, names, st.binary(max_size=200)), max_size=5),
    st.integers(1, 65_535),
    st.sampled_from([0, 50, 64, 131_072]),
)
def test_frames_are_pikas(messages: list[tuple[str, str, bytes]], channel: int, frame_max: int) -> None:
    """As a channel of pika's writes them, a body in pieces of at most what a frame takes."""
    frames = Frames(channel, frame_max)
    properties = BasicProperties(delivery_mode=2, message_id="id-1", headers={"a": "b"})
    for exchange, key, body in messages:
        publish = spec.Basic.Publish(exchange=exchange, routing_key=key, mandatory=True)
        wanted = [frame.Method(channel, publish), frame.Header(channel, len(body), properties)]
        step = frame_max - 8 if frame_max else 200
        wanted += [frame.Body(channel, body[start : start + step]) for start in range(0, len(body), step)]
        found = frames.message(exchange, key, body, properties)
        assert found == b"".join(each.marshal() for each in wanted)


def test_properties_are_one_frame_at_most() -> None:
    """The broker would close the connection, and everything else on it would be sent again and again."""
    properties = BasicProperties(headers={"a": "b" * 100})
    size = len(frame.Header(1, 0, properties).marshal())
    assert Frames(1, size).message("", "q", b"", properties)
    with pytest.raises(LimitExceeded, match=r"^headers: .* more than a frame"):
        Frames(1, size - 1).message("", "q", b"", properties)
